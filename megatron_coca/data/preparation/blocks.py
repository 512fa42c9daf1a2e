"""Blocks: consecutive units of a corpus, tokenized before shards are written, by any process of any host.

A block is a zip file in ``.<output>.blocks``, complete or absent, with the tokenized chunks of its units. ``prepare``
reads blocks instead of the units in them and does the rest as always, so that its result does not depend on who made
which block, or if there are any. Its name is a digest of all that its content depends on: settings, tokenizer, units.
"""

import hashlib
import itertools
import json
import os
import shutil
import socket
import tempfile
import zipfile
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
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
from megatron_coca.data.readers.source import ReadingProblems
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.kinds import Tokenizer

TokenizerSource = Tokenizer | Callable[[Path], Tokenizer]
"""A tokenizer, or a function that trains one in a folder; it is called once, and its result kept while interrupted."""
BLOCK_BYTES = 256 << 20
"""Bytes on disk of the units of a block, about: minutes of work for one core, and few files for a large corpus."""
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


def _digest(content: object) -> str:
    text = json.dumps([FORMAT, content], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:24]


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
        self._ranges: list[range] = []
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
        """Cut the units into blocks, at least one unit each. ``DataError`` for chats without a template."""
        chats = [source.spec.name for source in self._sources if source.spec.messages]
        if chats and tokenizer.chat is None:
            raise DataError(
                f"{', '.join(chats)}: the tokenizer has no chat template; give one with chat_template in the recipe, "
                "or --chat-template"
            )
        if chats:
            tokenizer.encode_rendered("")
        self._inputs, first, size = inputs, 0, 0
        for number, (_, unit) in enumerate(inputs.units):
            size += unit.size
            if size >= BLOCK_BYTES or number + 1 == len(inputs.units):
                self._ranges.append(range(first, number + 1))
                first, size = number + 1, 0
        for units in self._ranges:
            known = [
                (source, self._sources[source].spec.max_record_mib, os.fsencode(unit.path).hex(), unit.size, unit.stamp)
                for source, unit in inputs.units[units.start : units.stop]
            ]
            name = _digest([self._settings, self._rules.strict, tokenizer.fingerprint, known])
            self._paths.append(self.folder / f"{name}.block")

    def __len__(self) -> int:
        return len(self._ranges)

    def missing(self) -> list[int]:
        """The numbers of the blocks that are not made."""
        return [number for number, path in enumerate(self._paths) if not path.is_file()]

    def size(self, number: int) -> int:
        """Bytes on disk of the units of a block."""
        return sum(self._inputs.units[unit][1].size for unit in self._ranges[number])

    def chunks(self, unit: int) -> Iterator[TokenizedChunk] | None:
        """The chunks of a unit from its block, or None where that is not made.

        The iterator raises ``DataError`` at its end where the unit was damaged, and for a damaged block.
        """
        number = bisect_right(self._ranges, unit, key=lambda units: units.start) - 1
        path = self._paths[number]
        return self._read(path, unit - self._ranges[number].start) if path.is_file() else None

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

    def make(self, number: int, workers: int, read: Callable[[int], object] = lambda size: None) -> None:
        """Tokenize a block with as many worker processes; `read` is called with the bytes of every chunk.

        Raises ``DataError`` as ``prepare`` does.
        """
        partial = self._paths[number].with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        try:
            with (
                zipfile.ZipFile(partial, "w") as file,
                Pool(workers, self._sources, self._tokenizer, self._rules) as pool,
            ):
                for place, unit in enumerate(self._ranges[number]):
                    for index, chunk in enumerate(self._tokenized(unit, pool)):
                        if isinstance(chunk, TokenizedChunk):
                            file.writestr(f"{place}/{index}", _encoded(chunk))
                            read(chunk.read)
                        else:
                            file.writestr(f"{place}/{_DAMAGE}", str(chunk))
            flush(partial)
            partial.rename(self._paths[number])
        finally:
            partial.unlink(missing_ok=True)

    def _tokenized(self, unit: int, pool: Pool) -> Iterator[TokenizedChunk | DataError]:
        """Yield the chunks of a unit in order, and at its end the damage, if that is skipped."""
        source, described = self._inputs.units[unit]
        chunks = open_reader(self._sources[source].spec).chunks(described)
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
