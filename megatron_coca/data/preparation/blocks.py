"""The blocks of a corpus. A block consists of consecutive units, or of a piece of one large unit. Any process on any
host can tokenize a block.

A block is a zip file in `.<output>.blocks` with the tokenized chunks of its units. The file appears only when it is
complete. Its name is a digest of everything that its content depends on: settings, tokenizer, libraries, and the
content of the units (`unit_identity`). The name does not depend on the folders or modification times of files. If a
preparation is killed and started again, it builds only the missing blocks. If files or settings change, only the blocks
that depend on them are built again.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError, StoreUnavailable
from megatron_coca.data.preparation.acceptance import Watch
from megatron_coca.data.preparation.block_files import BLOCK_FORMAT, write_block
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Inputs, Rules
from megatron_coca.data.preparation.shard_plan import ShardPlan, divide
from megatron_coca.data.preparation.unit_identity import identity, token_libraries
from megatron_coca.data.preparation.workers import Pool, TokenizedChunk
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Chunk, ReadUnit
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.support.console import Progress
from megatron_coca.work.folders import make_once

TokenizerSource = Tokenizer | Callable[[Path], Tokenizer]
"""A tokenizer, or a function that trains a tokenizer in the given folder. The function is called only once, even if the
preparation is interrupted, because the trained tokenizer is kept.
"""
BLOCKS = 256
"""Approximate number of blocks in a corpus, unless `BLOCK_BYTES` limits their size. It is high enough that many
processes have work.
"""
BLOCK_BYTES = (8 << 20, 256 << 20)
"""Minimum and maximum size of a block in bytes on disk. With these sizes, one core builds a block in seconds to
minutes, and a large corpus has few block files.
"""


def settings_of(
    sources: Sequence[CorpusSource], tokenizer: TokenizerSource, rules: Rules, notes: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the settings that determine the output, except the input files and the handling of unusable records."""
    fractions = {"valid_fraction": rules.valid_fraction, "test_fraction": rules.test_fraction}
    by_name = {source.spec.name: asdict(replace(source, spec=replace(source.spec, paths=()))) for source in sources}
    for values in by_name.values():
        del values["spec"]["max_record_mib"], values["max_faulty"]
        # Keys with their default values are left out, so that they do not change the digest of a corpus without chats
        # or with many documents.
        if values["spec"]["messages"] is None:
            del values["spec"]["messages"]
        for name, default in (("cut", False), ("train_from", None)):
            if values[name] == default:
                del values[name]
    fingerprint = None if callable(tokenizer) else tokenizer.fingerprint
    settings = {"sources": by_name, "tokenizer": fingerprint, **fractions, **(notes or {})}
    if not callable(tokenizer) and tokenizer.start_symbol is not None:
        settings["start_token"] = tokenizer.start_symbol
    if not callable(tokenizer) and any(source.spec.messages for source in sources):
        settings["chat"] = None if tokenizer.chat is None else asdict(tokenizer.chat)
        if settings["chat"] is not None and (now := settings["chat"].pop("now")) is not None:
            settings["chat"]["time"] = now
        if settings["chat"] is not None and not settings["chat"]["variables"]:
            del settings["chat"]["variables"]
    return json.loads(json.dumps(settings, default=str))


def made_from(inputs: Inputs, settings: Mapping[str, Any], rules: Rules) -> str:
    """Return a digest of everything that determines the output of a preparation. `settings` is the result of
    `settings_of`.
    """
    read = [identity(unit) for _, unit in inputs.units]
    return _digest([settings, rules.strict, rules.shard_gib, read, token_libraries()])


def block_bytes(size: int) -> int:
    """Return the size of a block in bytes, for a corpus of `size` bytes. The result is a power of two, so that adding a
    little text to the corpus changes few blocks.
    """
    least, most = BLOCK_BYTES
    return min(max(least, 1 << (size // BLOCKS).bit_length()), most)


def _digest(content: object) -> str:
    text = json.dumps([BLOCK_FORMAT, content], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


@dataclass(frozen=True)
class BlockContent:
    """The content of a block: all of `units`, or a piece of a single unit.

    A piece contains the chunks that start at offset `begin` or later, and before offset `end`. The offset of a chunk is
    the sum of `Chunk.read` over the earlier chunks of the unit, in bytes on disk.
    """

    units: range
    begin: int = 0
    end: float = math.inf


def cut(sizes: Sequence[int]) -> list[BlockContent]:
    """Cut units into blocks, given the size of each unit on disk. A unit at least as large as two blocks is cut into
    several blocks.
    """
    aim, blocks, first, size = block_bytes(sum(sizes)), list[BlockContent](), 0, 0
    for number, own in enumerate(sizes):
        pieces = own // aim
        if first < number and pieces > 1:
            blocks.append(BlockContent(range(first, number)))
            first, size = number, 0
        size += own
        if pieces > 1:
            begins = [own * piece // pieces for piece in range(pieces)]
            blocks += map(BlockContent, [range(number, number + 1)] * pieces, begins, [*begins[1:], math.inf])
        elif size >= aim or number + 1 == len(sizes):
            blocks.append(BlockContent(range(first, number + 1)))
        else:
            continue
        first, size = number + 1, 0
    return blocks


def contents(blocks: Sequence[BlockContent], units: Sequence[tuple[int, ReadUnit]]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, block, size) for each source in each block, in order. The size counts the bytes on disk that the
    source has in this block.
    """
    for number, block in enumerate(blocks):
        for source, own in groupby(units[block.units.start : block.units.stop], key=lambda unit: unit[0]):
            yield source, number, sum(int(min(unit.size, block.end)) - block.begin for _, unit in own)


class ChunkStream:
    """Reads the chunks of a unit once, piece by piece."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks, self._position = chunks, 0
        self._damage: DataError | None = None

    def piece(self, block: BlockContent) -> Iterator[Chunk]:
        """Yield the chunks of a piece. Pieces must be requested in order. Raises `DataError` if the unit is damaged in
        this piece or in an earlier piece.
        """
        if self._damage is not None:
            raise self._damage
        while self._position < block.end:
            try:
                chunk = next(self._chunks, None)
            except DataError as error:
                self._damage = error
                raise
            if chunk is None:
                return
            begin, self._position = self._position, self._position + chunk.read
            if begin >= block.begin:
                yield chunk


class Blocks:
    """All blocks of a preparation, whether built or not.

    The first process that creates this object trains the tokenizer, if necessary, while the other processes wait. This
    process also fixes the time that the chat template prints.

    Args:
        sources, inputs, rules: the sources, inputs and rules of the preparation.
        output: the folder to prepare. The block files are in a folder next to it. All hosts must share the storage of
            both folders.
        tokenizer: a tokenizer, or a function that trains a tokenizer in a given folder.
        settings: the result of `settings_of`.

    Attributes:
        tokenizer: the tokenizer of the preparation. Its chat template has no fixed time.
        paths: the paths of all block files in order, whether the files exist or not.
        chat_time: the time that the template prints in all chats, in ISO 8601; None if the template does not ask for
            the time.

    Raises `DataError` if a source contains chats but the tokenizer has no chat template.
    """

    def __init__(
        self,
        sources: Sequence[CorpusSource],
        inputs: Inputs,
        output: Path,
        tokenizer: TokenizerSource,
        rules: Rules,
        settings: Mapping[str, Any],
    ) -> None:
        self.folder = blocks_folder(output)
        self._sources, self._inputs, self._rules = sources, inputs, rules
        # A trained tokenizer depends on the text, so a preparation of other files trains a new tokenizer.
        self._identities = [identity(unit) for _, unit in inputs.units]
        read = [settings, self._identities] if callable(tokenizer) else settings
        self._saved = self.folder / f"tokenizer-{_digest([read, token_libraries()])}"
        self.tokenizer, self.chat_time = self._share(tokenizer), None
        if self.tokenizer.chat is not None:
            self.chat_time = self.tokenizer.chat.now
            self.tokenizer.chat = replace(self.tokenizer.chat, now=None)
        chats = [source.spec.name for source in sources if source.spec.messages]
        if chats and self.tokenizer.chat is None:
            raise DataError(
                f"{', '.join(chats)}: the tokenizer has no chat template; set chat_template in the recipe, or pass "
                "--chat-template"
            )
        if chats:
            self.tokenizer.encode_rendered("")
        self._blocks = cut([unit.size for _, unit in inputs.units])
        self.paths = [self.folder / f"{self._name(block, settings)}.block" for block in self._blocks]

    def _share(self, source: TokenizerSource) -> Tokenizer:
        self.folder.mkdir(parents=True, exist_ok=True)

        def save(folder: Path) -> None:
            with tempfile.TemporaryDirectory() as scratch:
                tokenizer = source(Path(scratch)) if callable(source) else source
                with self._set_time(tokenizer):
                    tokenizer.save(folder)

        make_once(self._saved, save, DataError, wait=True)
        return load_saved_tokenizer(self._saved)

    @contextmanager
    def _set_time(self, tokenizer: Tokenizer) -> Iterator[None]:
        """Fix the time of the chat template in the `with` block if the template prints the current time. Then all hosts
        and resumed commands print the same time.
        """
        chat = tokenizer.chat
        if chat is not None and chat.asks_for_time and chat.now is None:
            tokenizer.chat = replace(chat, now=datetime.now().isoformat())
        try:
            yield
        finally:
            tokenizer.chat = chat

    def _name(self, block: BlockContent, settings: Mapping[str, Any]) -> str:
        units = self._inputs.units[block.units.start : block.units.stop]
        names = [self._sources[source].spec.name for source, _ in units]
        own = {**settings, "sources": {name: settings["sources"][name] for name in names}}
        known = [
            (name, self._sources[source].spec.max_record_mib, *self._identities[number])
            for name, (source, _), number in zip(names, units, block.units, strict=True)
        ]
        time = [] if self.chat_time is None else [self.chat_time]
        tokens = [self.tokenizer.fingerprint, token_libraries()]
        return _digest([own, self._rules.strict, *tokens, known, block.begin, str(block.end), *time])

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self) -> list[int]:
        """Return the numbers of the blocks that are not built yet."""
        return [number for number, path in enumerate(self.paths) if not path.is_file()]

    def size(self, number: int) -> int:
        """Return the size of a block's content in bytes on disk."""
        return sum(size for *_, size in contents([self._blocks[number]], self._inputs.units))

    def plan(self, shard_bytes: int | None) -> ShardPlan:
        """Return the plan of the shards. The number of a unit is its index in `ShardPlan.owners`."""
        return ShardPlan(
            folder=self.folder / f"shards-{_digest([[path.name for path in self.paths], shard_bytes])}",
            sources=self._sources,
            vocab_size=self.tokenizer.vocab_size,
            owners=np.array([source for source, _ in self._inputs.units], dtype=np.int64),
            blocks=[(path, block.units.start) for path, block in zip(self.paths, self._blocks, strict=True)],
            tasks=divide(contents(self._blocks, self._inputs.units), shard_bytes),
        )

    def make(self, numbers: Sequence[int], execution: Execution) -> None:
        """Build blocks in order. A large unit is read only once for all its pieces.

        Raises `DataError` as `prepare` does. Damaged files are reported together, after the other blocks are built.
        """
        if not numbers:
            return
        damages = dict[str, None]()
        with (
            Pool(execution.workers, self._sources, self._saved, self._rules) as pool,
            Progress("tokenizing", sum(map(self.size, numbers)) or None, "B", show=execution.progress) as progress,
        ):
            for number, results in groupby(self._tokenized(numbers, pool), key=lambda result: result[0]):
                if damage := self._write(number, results, progress):
                    damages[damage] = None
        if damages:
            raise DataError("\n".join(damages))

    def _write(
        self, number: int, results: Iterator[tuple[int, int, TokenizedChunk | DataError | None]], progress: Progress
    ) -> str:
        first = self._blocks[number].units.start
        found = ((unit - first, result) for _, unit, result in results)
        return write_block(self.paths[number], found, progress.advance)

    def _chunks(self, numbers: Sequence[int]) -> Iterator[tuple[int, int, Chunk | DataError | None]]:
        """Yield (block, unit, chunk) in order. After the last chunk of each unit or piece, yield (block, unit, error).
        The error is None if the unit is not damaged.
        """
        stream, opened = ChunkStream(iter(())), -1
        for number in numbers:
            for unit in self._blocks[number].units:
                if unit != opened:
                    source, described = self._inputs.units[unit]
                    stream, opened = ChunkStream(open_reader(self._sources[source].spec).chunks(described)), unit
                damage = None
                try:
                    for chunk in stream.piece(self._blocks[number]):
                        yield number, unit, chunk
                except StoreUnavailable:
                    raise
                except DataError as error:
                    damage = error
                yield number, unit, damage

    def _tokenized(
        self, numbers: Sequence[int], pool: Pool
    ) -> Iterator[tuple[int, int, TokenizedChunk | DataError | None]]:
        """Yield the items of `_chunks` with the chunks tokenized. Up to `pool.in_flight` chunks are in progress at a
        time.
        """
        waiting: deque[tuple[int, int, Callable[[], TokenizedChunk | DataError | None]]] = deque()
        watch = Watch(self._sources, self.tokenizer, self._rules)

        def done(unit: int, job: Callable[[], TokenizedChunk | DataError | None]) -> TokenizedChunk | DataError | None:
            result = job()
            if isinstance(result, TokenizedChunk):
                watch.see(self._inputs.units[unit][0], len(result.lengths), result.problems, result.sample)
            return result

        for number, unit, found in self._chunks(numbers):
            if isinstance(found, Chunk):
                waiting.append((number, unit, pool.submit(self._inputs.units[unit][0], found)))
            else:
                waiting.append((number, unit, partial(self._end, unit, found)))
            while len(waiting) > pool.in_flight:
                number, unit, job = waiting.popleft()
                yield number, unit, done(unit, job)
        for number, unit, job in waiting:
            yield number, unit, done(unit, job)

    def _end(self, unit: int, damage: DataError | None) -> DataError | None:
        """Return `damage`, the error that stopped the reading of a unit, or None if there was no error. If the unit has
        changed since it was listed, return the error about this change instead.
        """
        source, described = self._inputs.units[unit]
        try:
            open_reader(self._sources[source].spec).check_unchanged(described)
        except StoreUnavailable:
            raise
        except DataError as error:
            return error
        return damage


def blocks_folder(output: Path) -> Path:
    """Return the folder that contains the blocks of `output`."""
    return output.with_name(f".{output.name}.blocks")


def remove_blocks(output: Path, unused: bool = False) -> None:
    """Remove the blocks of `output`. With `unused`, remove the folder only if no block is built or in progress."""
    folder = blocks_folder(output)
    if not (unused and any(folder.glob("*.block*"))):
        shutil.rmtree(folder, ignore_errors=True)
