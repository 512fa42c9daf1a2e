"""Blocks: consecutive units of a corpus, or pieces of a large one, tokenized before shards are written, by any process
of any host.

A block is a zip file in ``.<output>.blocks``, complete or absent, with the tokenized chunks of its units. ``prepare``
reads blocks instead of the units in them and does the rest as always, so that its result does not depend on who made
which block, or if there are any. Its name is a digest of all that its content depends on: settings, tokenizer, units.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import socket
import tempfile
import zipfile
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.atomic_write import atomic_dir, exclusive_lock, flush
from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.preparation.manifest import FORMAT
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Inputs, Rules
from megatron_coca.data.preparation.workers import DIGEST_BYTES, Pool, TokenizedChunk
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Chunk, ReadingProblems
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import Tokenizer

TokenizerSource = Tokenizer | Callable[[Path], Tokenizer]
"""A tokenizer, or a function that trains one in a folder; it is called once, and its result kept while interrupted."""
BLOCKS = 256
"""Blocks of a corpus, about, so that many processes share a small one."""
BLOCK_BYTES = (8 << 20, 256 << 20)
"""The least and most bytes on disk of a block: seconds to minutes of a core, and few files for a large corpus."""
MOST_PIECES = 32
"""Blocks of one unit: to find the beginning of its piece, a process reads all of the unit before it. Reading a file is
4 (bzip2) to 500 (plain) times as fast as tokenizing it.
"""
_DAMAGE = "damage"


def settings_of(
    sources: Sequence[CorpusSource], tokenizer: TokenizerSource, rules: Rules, notes: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides what is written, apart from the files, which the journal records one by one, and from the
    treatment of problems, which may change on resuming.
    """
    fractions = {"valid_fraction": rules.valid_fraction, "test_fraction": rules.test_fraction}
    by_name = {source.spec.name: asdict(replace(source, spec=replace(source.spec, paths=()))) for source in sources}
    for values in by_name.values():
        del values["spec"]["max_record_mib"]
        if values["spec"]["messages"] is None:  # as in the settings of preparations from before this key
            del values["spec"]["messages"]
    fingerprint = None if callable(tokenizer) else tokenizer.fingerprint
    settings = {"sources": by_name, "tokenizer": fingerprint, **fractions, **(notes or {})}
    if not callable(tokenizer) and any(source.spec.messages for source in sources):
        settings["chat"] = None if tokenizer.chat is None else asdict(tokenizer.chat)
    return json.loads(json.dumps(settings, default=str))


def _block_bytes(size: int) -> int:
    """Bytes of a block of a corpus of `size` bytes: a power of two, so that a little more text changes few blocks."""
    least, most = BLOCK_BYTES
    return min(max(least, 1 << (size // BLOCKS).bit_length()), most)


def _digest(content: object) -> str:
    text = json.dumps([FORMAT, content], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


@dataclass(frozen=True)
class Block:
    """What a block holds: the ``units``, or a piece of one.

    The piece has the chunks that begin at ``begin`` or later and before ``end``, in bytes on disk as in ``Chunk.read``.
    """

    units: range
    begin: int = 0
    end: float = math.inf


class ChunkStream:
    """Reads the chunks of a unit once, piece by piece."""

    def __init__(self, chunks: Iterator[Chunk]) -> None:
        self._chunks, self._position = chunks, 0
        self._damage: DataError | None = None

    def piece(self, block: Block) -> Iterator[Chunk]:
        """Yield the chunks of a piece, which must not be before the last one. ``DataError`` where the unit is damaged,
        also for the pieces behind that.
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
    """The blocks of a preparation, made or not.

    Args:
        output: the folder that is prepared; the blocks are beside it, on storage that all hosts share.
        settings: from ``settings_of``.
    """

    def __init__(
        self, sources: Sequence[CorpusSource], output: Path, rules: Rules, settings: Mapping[str, Any]
    ) -> None:
        self.folder = output.with_name(f".{output.name}.blocks")
        self._sources, self._rules, self._settings = sources, rules, settings
        self._tokenizer = self.folder / f"tokenizer-{_digest(settings)}"
        self._blocks: list[Block] = []
        self._paths: list[Path] = []
        self._opened: zipfile.ZipFile | None = None

    def share_tokenizer(self, source: TokenizerSource) -> Tokenizer:
        """Save the tokenizer for all hosts and return it; the first that comes trains it, the others wait."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(self._tokenizer.with_suffix(".lock"), DataError, busy=None):
            if not self._tokenizer.is_dir():
                with tempfile.TemporaryDirectory() as scratch, atomic_dir(self._tokenizer, DataError) as folder:
                    (source(Path(scratch)) if callable(source) else source).save(folder)
        return load_saved_tokenizer(self._tokenizer)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that is shared by the hosts, if there is one."""
        return load_saved_tokenizer(self._tokenizer) if self._tokenizer.is_dir() else None

    def cut(self, inputs: Inputs, tokenizer: Tokenizer) -> None:
        """Cut the units into blocks. ``DataError`` for chats without a template."""
        chats = [source.spec.name for source in self._sources if source.spec.messages]
        if chats and tokenizer.chat is None:
            raise DataError(
                f"{', '.join(chats)}: the tokenizer has no chat template; give one with chat_template in the recipe, "
                "or --chat-template"
            )
        if chats:
            tokenizer.encode_rendered("")
        self._inputs, first, size, aim = inputs, 0, 0, _block_bytes(sum(unit.size for _, unit in inputs.units))
        for number, (_, unit) in enumerate(inputs.units):
            pieces = min(unit.size // aim, MOST_PIECES)
            size += unit.size
            if first < number and pieces > 1:
                self._blocks.append(Block(range(first, number)))
                first, size = number, unit.size
            if pieces > 1:
                ends = [*(unit.size * piece // pieces for piece in range(1, pieces)), math.inf]
                self._blocks += map(Block, [range(number, number + 1)] * pieces, [0, *map(int, ends[:-1])], ends)
            elif size >= aim or number + 1 == len(inputs.units):
                self._blocks.append(Block(range(first, number + 1)))
            else:
                continue
            first, size = number + 1, 0
        for block in self._blocks:
            known = [
                (source, self._sources[source].spec.max_record_mib, os.fsencode(unit.path).hex(), unit.size, unit.stamp)
                for source, unit in inputs.units[block.units.start : block.units.stop]
            ]
            content = [self._settings, self._rules.strict, tokenizer.fingerprint, known, block.begin, str(block.end)]
            self._paths.append(self.folder / f"{_digest(content)}.block")

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self) -> list[int]:
        """The numbers of the blocks that are not made."""
        return [number for number, path in enumerate(self._paths) if not path.is_file()]

    def size(self, number: int) -> int:
        """Bytes on disk of what a block holds."""
        block = self._blocks[number]
        return int(min(sum(self._inputs.units[unit][1].size for unit in block.units), block.end) - block.begin)

    def chunks(self, unit: int) -> Iterator[Chunk | TokenizedChunk]:
        """The chunks of a unit in order, tokenized where their block is made.

        The iterator raises ``DataError`` at its end where the unit was damaged, and for a damaged block.
        """
        first = bisect_left(self._blocks, unit, key=lambda block: block.units.stop - 1)
        stream = self._stream(unit)
        for block, path in zip(self._blocks[first:], self._paths[first:], strict=True):
            if unit not in block.units:
                return
            if path.is_file():
                yield from self._read(path, unit - block.units.start)
            else:
                yield from stream.piece(block)

    def _stream(self, unit: int) -> ChunkStream:
        source, described = self._inputs.units[unit]
        return ChunkStream(open_reader(self._sources[source].spec).chunks(described))

    def _read(self, path: Path, unit: int) -> Iterator[TokenizedChunk]:
        try:
            if self._opened is None or self._opened.filename != str(path):
                self._opened = zipfile.ZipFile(path)
            names = self._opened.NameToInfo
            for index in itertools.takewhile(lambda index: f"{unit}/{index}" in names, itertools.count()):
                yield _decoded(self._opened.read(f"{unit}/{index}"))  # checks the CRC
            damage = self._opened.read(f"{unit}/{_DAMAGE}") if f"{unit}/{_DAMAGE}" in names else b""
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: cannot be read ({error}). Remove this file; it is made again.") from error
        if damage:
            raise DataError(damage.decode())

    def make(self, numbers: Sequence[int], workers: int, read: Callable[[int], object] = lambda size: None) -> None:
        """Tokenize blocks, in order, with as many worker processes; `read` is called with the bytes of every chunk.

        A unit is read once for all its pieces. Raises ``DataError`` as ``prepare`` does, with the reason of every
        block that failed, after the others are made.
        """
        failed, unit, stream = list[str](), -1, None
        with Pool(workers, self._sources, self._tokenizer, self._rules) as pool:
            for number in numbers:
                if self._blocks[number].units.start != unit:
                    unit, stream = self._blocks[number].units.start, None
                stream = stream or self._stream(unit)
                try:
                    self._make(number, stream, pool, read)
                except OutOfMemory:
                    raise
                except DataError as error:
                    failed += [str(error)] if str(error) not in failed else []
        if failed:
            raise DataError("\n".join(failed))

    def _make(self, number: int, stream: ChunkStream, pool: Pool, read: Callable[[int], object]) -> None:
        """Make a block; `stream` is of its first unit."""
        block = self._blocks[number]
        partial = self._paths[number].with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        try:
            with zipfile.ZipFile(partial, "w") as file:
                for place, unit in enumerate(block.units):
                    chunks = (stream if not place else self._stream(unit)).piece(block)
                    for index, chunk in enumerate(self._tokenized(self._inputs.units[unit][0], chunks, pool)):
                        if isinstance(chunk, TokenizedChunk):
                            file.writestr(f"{place}/{index}", _encoded(chunk))
                            read(chunk.read)
                        else:
                            file.writestr(f"{place}/{_DAMAGE}", str(chunk))
            flush(partial)
            partial.rename(self._paths[number])
        finally:
            partial.unlink(missing_ok=True)

    def _tokenized(self, source: int, chunks: Iterator[Chunk], pool: Pool) -> Iterator[TokenizedChunk | DataError]:
        """Yield chunks of a source in order, and at their end the damage, if that is skipped."""
        waiting: deque[Callable[[], TokenizedChunk]] = deque()
        more, damage = True, None
        while more:
            try:
                chunk = next(chunks, None)
            except DataError as error:
                if isinstance(error, OutOfMemory) or not self._rules.skip_damaged:
                    raise
                chunk, damage = None, error
            more = chunk is not None
            if chunk is not None:
                waiting.append(pool.submit(source, chunk))
            while waiting and (not more or len(waiting) > pool.in_flight):
                yield waiting.popleft()()
        if damage is not None:
            yield damage

    def remove(self) -> None:
        """Remove all blocks, at the end of the preparation."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _encoded(chunk: TokenizedChunk) -> bytes:
    """A chunk as arrays of NumPy, one after the other: its facts as JSON, then its columns."""
    facts = {
        "targets": chunk.targets,
        "sets": sorted(chunk.sets),
        "problems": chunk.problems.facts(),
        "read": chunk.read,
        "labels": chunk.labels is not None,
    }
    stream = BytesIO()
    text = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    digests = np.frombuffer(b"".join(chunk.digests), dtype=np.uint8)
    for array in (text, chunk.target, chunk.lengths, chunk.text_bytes, chunk.tokens, digests):
        np.save(stream, array, allow_pickle=False)
    if chunk.labels is not None:
        np.save(stream, chunk.labels, allow_pickle=False)
    return stream.getvalue()


def _decoded(content: bytes) -> TokenizedChunk:
    stream = BytesIO(content)
    text, target, lengths, text_bytes, tokens, digests = (np.load(stream, allow_pickle=False) for _ in range(6))
    facts, raw = json.loads(text.tobytes()), digests.tobytes()
    return TokenizedChunk(
        targets=[(part, split) for part, split in facts["targets"]],
        target=target,
        lengths=lengths,
        text_bytes=text_bytes,
        tokens=tokens,
        digests=[raw[begin : begin + DIGEST_BYTES] for begin in range(0, len(raw), DIGEST_BYTES)],
        sets=frozenset(facts["sets"]),
        problems=ReadingProblems.restored(facts["problems"], strict=False),
        read=facts["read"],
        labels=np.load(stream, allow_pickle=False) if facts.get("labels") else None,
    )
