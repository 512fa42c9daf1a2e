"""Tokenize the chunks of a corpus, in this process or in a pool of processes."""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.preparation.faults import NOT_ENCODED, WITHOUT_ANSWER
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Rules, hash_fraction, parts_of
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.source import Chunk, Document, ReadingProblems
from megatron_coca.data.shards import MASKED, token_dtype
from megatron_coca.data.tokenizers import load_saved_tokenizer
from megatron_coca.data.tokenizers.chat_labels import Counted, encode_chat, roles_of
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.data.tokenizers.losses import PASSAGE, Sample, passages_of, sampled
from megatron_coca.support.errors import FAILED
from megatron_coca.work.workers import process_pool

DIGEST_BYTES = 16
IN_FLIGHT = 4
"""Number of chunks in progress for each process. It is above 1 so that no process waits for the slowest chunk."""
SAMPLED = 16
"""Number of passages of each chunk that are encoded and decoded to detect losses. These passages are about 1.5% of the
text.
"""


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """The documents of one chunk in order, stored as columns.

    Attributes:
        targets: the pairs (set, split) that occur in the chunk; the documents of each pair go to a separate shard.
        target: for each document, the index of its pair in `targets`, int64 [documents].
        lengths: number of tokens of each document, including its separator, int32 [documents].
        text_bytes: number of UTF-8 bytes of each document, int64 [documents].
        tokens: the tokens of all documents, concatenated, in the dtype of the shard.
        digests: BLAKE2b digest of each text, uint8 [documents, 16].
        sets: the sets that occur in the chunk.
        problems: counts of unusable and filtered records.
        read: the value of `Chunk.read`.
        labels: the labels of all tokens in the format of a label shard, int32; None if every token counts in the loss.
        sample: the tokenizer's losses in a sample of passages from the documents.
    """

    targets: list[tuple[str, str]]
    target: np.ndarray
    lengths: np.ndarray
    text_bytes: np.ndarray
    tokens: np.ndarray
    digests: np.ndarray
    sets: frozenset[str]
    problems: ReadingProblems
    read: int
    labels: np.ndarray | None = None
    sample: Sample = field(default_factory=Sample)


class Tokenized(NamedTuple):
    """A tokenized document.

    Attributes:
        text: the text in UTF-8.
        tokens: the tokens in the dtype of the shard, including the separator.
        labels: the labels, int32, or None if every token counts in the loss.
    """

    text: bytes
    tokens: np.ndarray
    labels: np.ndarray | None = None


class ChunkTokenizer:
    """Turns chunks into tokens: parses the documents, selects a fraction of them, chooses their splits, and tokenizes
    them.
    """

    def __init__(self, sources: Sequence[CorpusSource], tokenizer: Tokenizer, rules: Rules) -> None:
        self._sources, self._tokenizer, self._rules = sources, tokenizer, rules
        self._readers = [open_reader(source.spec) for source in sources]
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._start = [] if (start := tokenizer.trained_start) is None else [start]

    def tokenize(self, number: int, chunk: Chunk) -> TokenizedChunk:
        """Tokenize a chunk of source `number`."""
        source, problems = self._sources[number], ReadingProblems(self._rules.strict)
        documents: list[Document] = []
        for document in self._readers[number].documents(chunk, problems):
            if source.fraction == 1 or hash_fraction(f"sample/{document.text}") < source.fraction:
                documents.append(document)
            else:
                problems.leave_out("not in the fraction")
        if source.spec.messages is not None:
            documents, done = self._chats(documents, source.spec.messages, problems)
            divided = [part for document in documents for part in parts_of(source, document, self._rules)]
        else:
            divided, done = self._texts(source, documents, problems)
        tokens = [each.tokens for each in done]
        labels = [each.labels for each in done if each.labels is not None]
        targets: dict[tuple[str, str], int] = {}
        target = []
        for document, split in divided:
            part = document.part if source.spec.divide else ""
            target.append(targets.setdefault((part, split), len(targets)))
        digests = [hashlib.blake2b(each.text, digest_size=DIGEST_BYTES).digest() for each in done]
        return TokenizedChunk(
            targets=list(targets),
            target=np.array(target, dtype=np.int64),
            lengths=np.array([len(each) for each in tokens], dtype=np.int32),
            text_bytes=np.array([len(each.text) for each in done], dtype=np.int64),
            tokens=np.concatenate([np.empty(0, dtype=self._dtype), *tokens]),
            digests=np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
            sets=frozenset(document.part for document, _ in divided if document.part),
            problems=problems,
            read=chunk.read,
            labels=np.concatenate(labels) if labels else None,
            sample=self._sample([each.text for each in done], digests),
        )

    def _sample(self, texts: Sequence[bytes], digests: Sequence[bytes]) -> Sample:
        """Encode and decode passages of some texts, and return the counts. The texts with the smallest digests are
        chosen, so that every run chooses the same texts.
        """
        chosen = sorted(range(len(texts)), key=digests.__getitem__)[:SAMPLED]
        heads = [texts[number][: 4 * PASSAGE * SAMPLED // len(chosen)].decode(errors="ignore") for number in chosen]
        return sampled(self._tokenizer, passages_of(heads, SAMPLED))

    def _texts(
        self, source: CorpusSource, documents: Sequence[Document], problems: ReadingProblems
    ) -> tuple[list[tuple[Document, str]], list[Tokenized]]:
        """Return two lists: pairs (document or part of a document, split), and the tokens for each pair. Documents that
        the tokenizer cannot encode are added to `problems` instead.
        """
        divided, done = [], []
        for document in documents:
            parts = parts_of(source, document, self._rules)
            try:
                done += [self._text(part.text) for part, _ in parts]
                divided += parts
            except DataError as error:
                problems.add(document.place, NOT_ENCODED, str(error), len(document.text))
        return divided, done

    def _text(self, text: str) -> Tokenized:
        tokens = [*self._start, *self._tokenizer.encode(text), self._tokenizer.eod]
        return Tokenized(text.encode(), np.array(tokens, dtype=self._dtype))

    def _chats(
        self, documents: Sequence[Document], counted: Counted, problems: ReadingProblems
    ) -> tuple[list[Document], list[Tokenized]]:
        """Return two lists: documents, and the tokens of each. Documents that the chat template cannot render and
        documents without an answer are added to `problems` instead.
        """
        kept, done = [], []
        for document in documents:
            try:
                record = json.loads(document.text)
                chat = encode_chat(self._tokenizer, record, counted)
            except (DataError, RecursionError) as error:
                problems.add(document.place, "chat that cannot be rendered", str(error), len(document.text))
                continue
            if not chat.counts.any():
                problems.add(document.place, WITHOUT_ANSWER, f"its roles are {roles_of(record)}", len(document.text))
                continue
            tokens = chat.tokens.astype(self._dtype)
            labels = None if counted == "all" else np.where(chat.counts, chat.tokens, MASKED).astype(np.int32)
            done.append(Tokenized(chat.text.encode(), tokens, labels))
            kept.append(document)
        return kept, done


# One tokenizer per worker process, because opening a tokenizer takes longer than tokenizing a chunk.
_chunk_tokenizer: ChunkTokenizer | None = None


def _start_worker(sources: Sequence[CorpusSource], tokenizer: Path, rules: Rules) -> None:
    global _chunk_tokenizer  # noqa: PLW0603 - a process pool has no other place for the results of its initializer
    _chunk_tokenizer = ChunkTokenizer(sources, load_saved_tokenizer(tokenizer), rules)


def _tokenize_in_worker(number: int, chunk: Chunk) -> TokenizedChunk:
    assert _chunk_tokenizer is not None
    return _chunk_tokenizer.tokenize(number, chunk)


class Pool:
    """A context manager for a pool of `workers` processes that tokenize chunks. With 0 workers, the current process
    tokenizes the chunks. `tokenizer` is the folder of a saved tokenizer.
    """

    def __init__(self, workers: int, sources: Sequence[CorpusSource], tokenizer: Path, rules: Rules) -> None:
        self.in_flight = IN_FLIGHT * workers
        self._executor: ProcessPoolExecutor | None = None
        if not workers:
            self._local = ChunkTokenizer(sources, load_saved_tokenizer(tokenizer), rules)
            return
        self._executor = process_pool(workers, partial(_start_worker, list(sources), tokenizer, rules))

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, source: int, chunk: Chunk) -> Callable[[], TokenizedChunk]:
        """Start to tokenize a chunk. Return a function that waits for the result and returns it. Without workers, this
        function tokenizes the chunk.
        """
        if self._executor is None:
            return lambda: self._local.tokenize(source, chunk)
        try:
            future = self._executor.submit(_tokenize_in_worker, source, chunk)
        except (BrokenProcessPool, OSError) as error:  # OSError: the pool is shutting down and has closed its pipe
            raise lost_worker() from error
        return lambda: _fetch(future)


def _fetch(future: Future[TokenizedChunk]) -> TokenizedChunk:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise lost_worker() from error


class LostWorker(DataError):
    """A worker process was killed. The same command may succeed if it is run again, so its exit status is not the
    status for invalid input.
    """

    status = FAILED


def lost_worker() -> LostWorker:
    """Return the error for a worker process that was killed."""
    return LostWorker(
        "workers: a worker process was killed, probably because memory ran out; run the same command again with "
        "fewer --workers or a smaller max_record_mib, and it resumes"
    )
