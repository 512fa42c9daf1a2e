"""Chunks through a pool of processes, in bounded memory, and back in the order in which they were cut."""

import hashlib
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.preparation.plan import CorpusSource, Rules, position, split_of
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.files import place_of
from megatron_coca.data.readers.source import Chunk, Document, Reader, ReadingProblems, ReadUnit
from megatron_coca.data.shards import token_dtype
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.load import load_saved_tokenizer

SHINGLE_WORDS = 5
BANDS = 14
ROWS = 8
# Thai and Lao, Myanmar, Khmer, kana, Han: no spaces.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def band_hashes(texts: Sequence[str]) -> np.ndarray:
    """One hash per band of each text: uint64 [texts, BANDS]. Texts that share one are near duplicates.

    Raises ``DataError`` where datasketch is not installed.
    """
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise DataError("Removing near duplicates needs the datasketch package: pip install datasketch") from error
    signatures = np.empty((len(texts), BANDS * ROWS), dtype=np.uint64)
    for row, text in zip(signatures, texts, strict=True):
        sketch = MinHash(num_perm=BANDS * ROWS, seed=1)
        sketch.update_batch(_shingles(text))
        row[:] = sketch.hashvalues
    return _folded(signatures.reshape(len(texts), BANDS, ROWS))


def _shingles(text: str) -> list[bytes]:
    words = _WORD.findall(text.lower())
    if len(words) < SHINGLE_WORDS:
        return [text.encode()]  # too short to be like another one without being the same
    return list({" ".join(words[i : i + SHINGLE_WORDS]).encode() for i in range(len(words) - SHINGLE_WORDS + 1)})


def _folded(rows: np.ndarray) -> np.ndarray:
    """uint64 [..., ROWS] to uint64 [...], each band with a start of its own: FNV-1a by 64-bit words."""
    folded = np.broadcast_to(np.arange(1, BANDS + 1, dtype=np.uint64), rows.shape[:-1]).copy()
    for column in range(rows.shape[-1]):
        folded = (folded ^ rows[..., column]) * np.uint64(0x100000001B3)
        folded ^= folded >> np.uint64(32)
    return folded


DIGEST_BYTES = 16

Target = tuple[str, str]
"""(part of a source, split): what one shard holds."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The documents of one chunk, in order, as columns.

    Attributes:
        targets: the shards that occur.
        target: number in ``targets`` of each document, int64 [documents].
        lengths: tokens of each document, with the one that ends it, int32 [documents].
        bytes: of the UTF-8 text of each document, int64 [documents].
        tokens: of all documents, one after another, in the dtype of the shard.
        digests: 16 bytes of each text's BLAKE2b.
        bands: uint64 [documents, bands], where near duplicates are looked for, else None.
        sets: the sets that occur.
        problems: what could not be used.
    """

    targets: list[Target]
    target: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    tokens: np.ndarray
    digests: list[bytes]
    bands: np.ndarray | None
    sets: frozenset[str]
    problems: ReadingProblems


class Workshop:
    """Turns chunks into columns."""

    def __init__(self, sources: Sequence[CorpusSource], tokenizer: Tokenizer, rules: Rules) -> None:
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._readers = [open_reader(source.spec) for source in sources]
        self._dtype = token_dtype(tokenizer.vocab_size)

    def prepare(self, number: int, chunk: Chunk) -> Prepared:
        """Columns of a chunk of source ``number``."""
        source, problems = self._sources[number], ReadingProblems(self._rules.strict)
        try:
            return self._prepared(source, number, chunk, problems)
        except MemoryError as error:
            raise OutOfMemory(place_of(chunk)) from error

    def _prepared(self, source: CorpusSource, number: int, chunk: Chunk, problems: ReadingProblems) -> Prepared:
        documents = [d for d in self._readers[number].documents(chunk, problems) if _sampled(d, source, problems)]
        texts = [document.text for document in documents]
        encoded = [text.encode() for text in texts]
        ids = self._tokenizer.encode_batch(texts)
        targets: dict[Target, int] = {}
        target = [targets.setdefault(self._target(d, source), len(targets)) for d in documents]
        return Prepared(
            targets=list(targets),
            target=np.array(target, dtype=np.int64),
            lengths=np.array([len(tokens) + 1 for tokens in ids], dtype=np.int32),
            bytes=np.array([len(text) for text in encoded], dtype=np.int64),
            tokens=_joined(ids, self._tokenizer.eod, self._dtype),
            digests=[hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest() for text in encoded],
            bands=band_hashes(texts) if source.duplicates == "near" else None,
            sets=frozenset(document.part for document in documents if document.part),
            problems=problems,
        )

    def _target(self, document: Document, source: CorpusSource) -> Target:
        part = document.part if source.spec.divide else ""
        return part, source.split or split_of(document.key, self._rules)


def _sampled(document: Document, source: CorpusSource, problems: ReadingProblems) -> bool:
    if source.fraction == 1 or position(f"sample/{document.text}") < source.fraction:
        return True
    problems.leave_out("not in the fraction")
    return False


def _joined(documents: Iterable[Sequence[int]], eod: int, dtype: type[np.integer]) -> np.ndarray:
    ended = [np.array([*tokens, eod], dtype=dtype) for tokens in documents]
    return np.concatenate(ended) if ended else np.empty(0, dtype=dtype)


_workshop: Workshop | None = None  # one per process of the pool: opening a tokenizer takes longer than a chunk


def begin_process(sources: Sequence[CorpusSource], tokenizer: Path, rules: Rules) -> None:
    """Set up a process of the pool."""
    global _workshop
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _workshop = Workshop(sources, load_saved_tokenizer(tokenizer), rules)


def prepare_in_process(number: int, chunk: Chunk) -> Prepared:
    """``Workshop.prepare`` in a process that ``begin_process`` set up."""
    assert _workshop is not None
    return _workshop.prepare(number, chunk)


def _end_with_parent() -> None:
    """A killed parent tells nobody; its processes would wait for work for ever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


IN_FLIGHT = 4
"""Chunks on their way for each process: enough that none waits for the one whose chunk takes longest."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """The columns of one chunk of unit ``unit``, and the bytes that were read for it."""

    unit: int
    source: int
    read: int
    prepared: Prepared


@dataclass(frozen=True, slots=True)
class UnitDone:
    """All chunks of a unit were given before this; ``damage`` says why there are no more, where it is damaged."""

    unit: int
    source: int
    damage: DataError | None


@dataclass(frozen=True, slots=True)
class ChunkSkipped:
    """A chunk that was done before; the bytes had to be read to get past it."""

    source: int
    read: int


Step = ChunkDone | ChunkSkipped | UnitDone
_Cut = tuple[int, int, Chunk] | ChunkSkipped | UnitDone


class Submit(Protocol):
    """Begins the work on a chunk of a source; the result is fetched by calling what it returns."""

    def __call__(self, source: int, chunk: Chunk) -> Callable[[], Prepared]: ...


def cut(
    readers: Sequence[Reader], units: Sequence[tuple[int, ReadUnit]], first_unit: int, first_chunk: int
) -> Iterator[_Cut]:
    """(unit, source, chunk) of everything from a place on, with a ``UnitDone`` after each unit."""
    for number in range(first_unit, len(units)):
        source, unit = units[number]
        damage = None
        try:
            done = first_chunk if number == first_unit else 0
            for index, chunk in enumerate(readers[source].chunks(unit)):
                yield ChunkSkipped(source, chunk.read) if index < done else (number, source, chunk)
        except OutOfMemory:
            raise
        except DataError as error:
            damage = error
        yield UnitDone(number, source, damage)


def in_order(cuts: Iterator[_Cut], submit: Submit, in_flight: int) -> Iterator[Step]:
    """The steps in order, while up to ``in_flight`` chunks are being worked on."""
    waiting: deque[tuple[_Cut, Callable[[], Prepared] | None]] = deque()
    for each in cuts:
        waiting.append((each, submit(each[1], each[2]) if isinstance(each, tuple) else None))
        while len(waiting) > in_flight:
            yield _step(*waiting.popleft())
    while waiting:
        yield _step(*waiting.popleft())


def _step(each: _Cut, result: Callable[[], Prepared] | None) -> Step:
    if not isinstance(each, tuple):
        return each
    assert result is not None
    unit, source, chunk = each
    return ChunkDone(unit, source, chunk.read, result())


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """What is started meanwhile ignores Ctrl-C, which reaches the whole group; the one who started it does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Pool:
    """``workers`` processes, or this one where ``workers`` is 0. A context manager."""

    def __init__(self, workers: int, sources: Sequence[CorpusSource], tokenizer: Path, rules: Rules) -> None:
        self._workshop = Workshop(sources, load_saved_tokenizer(tokenizer), rules) if not workers else None
        self._executor = None
        self.in_flight = IN_FLIGHT * workers
        if workers:
            self._executor = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=begin_process, initargs=(list(sources), tokenizer, rules)
            )
            with _without_interrupts():
                self._executor.submit(int)  # starts all processes: an interrupt would end them in the middle of imports

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, source: int, chunk: Chunk) -> Callable[[], Prepared]:
        """Begin the work on a chunk; in this process it is done when the result is asked for."""
        if self._executor is None:
            workshop = self._workshop
            assert workshop is not None
            return lambda: workshop.prepare(source, chunk)
        try:
            future = self._executor.submit(prepare_in_process, source, chunk)
        except (BrokenProcessPool, OSError) as error:  # the latter while the pool takes itself down: a closed pipe
            raise _lost() from error
        return lambda: _result(future)


def _result(future: Future[Prepared]) -> Prepared:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _lost() from error


def _lost() -> DataError:
    return DataError(
        "A process of the preparation was ended from outside, as the system does when memory runs out. "
        "Run the same command again to go on from where it was, with fewer --workers if memory was short."
    )
