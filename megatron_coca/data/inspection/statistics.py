"""How a tokenizer's vocabulary is used by source."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection.collection import (
    ShardEntry,
    document_lengths,
    documents,
    some_documents,
    without_separator,
)
from megatron_coca.data.shards import read_header
from megatron_coca.data.tokenizers.kinds import FileTokenizer, Tokenizer
from megatron_coca.tables import excerpt, percent, table

QUANTILES = {"1%": 0.01, "10%": 0.1, "50%": 0.5, "90%": 0.9, "99%": 0.99}
THRESHOLDS = (512, 2048, 8192, 32768)
PICTURES = (".png", ".svg", ".pdf")
_COUNTED_ONE_BY_ONE = 1 << 20  # lengths below have a counter each; there are few documents above


@dataclass(frozen=True)
class Lengths:
    """How many documents have which length in tokens, separators included.

    Attributes:
        values: lengths that occur, ascending, int64 [n].
        counts: documents of each, int64 [n].
    """

    values: np.ndarray
    counts: np.ndarray

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.values * self.counts).sum())

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of the documents do not exceed."""
        return int(self.values[np.searchsorted(np.cumsum(self.counts), share * self.documents)])

    def share_in_longer(self, length: int) -> float:
        """Share of the tokens in documents of more than ``length`` tokens."""
        longer = self.values > length
        return int((self.values * self.counts)[longer].sum()) / max(1, self.tokens)

    def facts(self) -> dict[str, Any]:
        """What is worth knowing, as JSON can hold it."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "min": int(self.values[0]),
            **{name: self.quantile(share) for name, share in QUANTILES.items()},
            "max": int(self.values[-1]),
            "mean": self.tokens / self.documents,
            "share_of_tokens_in_longer": {str(length): self.share_in_longer(length) for length in THRESHOLDS},
        }


def count_lengths(pieces: Iterable[np.ndarray]) -> Lengths:
    """Count lengths, int64 [any] at a time; memory holds a counter per length below a million, and longer ones."""
    short = np.zeros(_COUNTED_ONE_BY_ONE, dtype=np.int64)
    long = [np.empty(0, dtype=np.int64)]
    for piece in pieces:
        is_short = piece < len(short)
        counted = np.bincount(piece[is_short])
        short[: len(counted)] += counted
        long.append(piece[~is_short])
    values, counts = np.unique(np.concatenate(long), return_counts=True)
    below = np.flatnonzero(short)
    return Lengths(np.concatenate((below, values)), np.concatenate((short[below], counts)))


def lengths_by_source(entries: Sequence[ShardEntry]) -> dict[str, Lengths]:
    """Lengths of the documents of each source, all its splits together. ``DataError`` for a damaged shard."""
    return {
        source: count_lengths(
            piece for entry in entries if entry.source == source for piece in document_lengths(entry.prefix)
        )
        for source in dict.fromkeys(entry.source for entry in entries)
    }


def lengths_table(found: dict[str, Lengths]) -> str:
    """Two tables: quantiles, and where the tokens are."""
    facts = {source: lengths.facts() for source, lengths in found.items()}
    titles = ["documents", "tokens", "min", *QUANTILES, "max", "mean"]
    quantiles = table(["source", *titles], [[name, *(f[title] for title in titles)] for name, f in facts.items()])
    longer = [
        [name, *(percent(share) for share in f["share_of_tokens_in_longer"].values())] for name, f in facts.items()
    ]
    shares = table(["tokens in documents longer than", *map(str, THRESHOLDS)], longer)
    return f"{quantiles}\n\n{shares}"


def check_picture(path: Path) -> None:
    """Raise ``DataError`` for a file name that does not end as a picture's."""
    if path.suffix.lower() not in PICTURES:
        raise DataError(f"{path}: no picture is drawn in this format. End the name in one of {', '.join(PICTURES)}.")


def plot_lengths(found: dict[str, Lengths], path: Path) -> None:
    """Draw a histogram of documents by length, one line per source, both axes logarithmic.

    Raises ``DataError`` for a file name that does not end in one of ``PICTURES``.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    shortest = max(1, min(int(lengths.values[0]) for lengths in found.values()))
    longest = max(2, *(int(lengths.values[-1]) for lengths in found.values()))
    edges = 2.0 ** np.arange(math.floor(math.log2(shortest)), math.log2(longest) + 0.5, 0.5)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for source, lengths in found.items():
        counts, _ = np.histogram(np.maximum(lengths.values, 1), bins=edges, weights=lengths.counts)
        axes.stairs(counts, edges, label=f"{source} ({lengths.documents:,})")
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(0.8, None),
        xlabel="tokens in a document",
        ylabel="documents",
        title="Document lengths",
    )
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


FREQUENT = 20
_SAMPLED = 200  # documents of a shard whose bytes are counted where no manifest has them
_AT_ONCE = 1 << 20
_LINE_FEED = "<0x0A>"


@dataclass(frozen=True)
class Coverage:
    """The vocabulary in one source.

    Attributes:
        documents: of all its shards.
        counts: occurrences of each token, separators included, int64 [vocab_size].
        bytes_per_token: of the UTF-8 text, without separators.
        measured_on: documents that this number comes from; all of them where manifests tell the bytes.
    """

    source: str
    documents: int
    counts: np.ndarray
    bytes_per_token: float
    measured_on: int

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def share(self, ids: Sequence[int]) -> float:
        """Of the tokens, those that are one of ``ids``."""
        return int(self.counts[list(ids)].sum()) / max(1, self.tokens)


def _read(entry: ShardEntry, tokenizer: Tokenizer, show: bool) -> np.ndarray:
    """Occurrences of each token, int64 [vocab_size]."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    total = read_header(entry.prefix).entries - 1
    buffered: list[np.ndarray] = []
    waiting = 0
    for tokens in tqdm(documents(entry.prefix), f"count {entry.label}", total, unit=" documents", disable=not show):
        buffered.append(tokens)
        waiting += len(tokens)
        if waiting >= _AT_ONCE:
            counts += _counted(np.concatenate(buffered), entry, tokenizer)
            buffered, waiting = [], 0
    return counts + _counted(np.concatenate([*buffered, np.empty(0, np.int64)]), entry, tokenizer)


def _counted(tokens: np.ndarray, entry: ShardEntry, tokenizer: Tokenizer) -> np.ndarray:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        raise DataError(
            f"{entry.prefix}: holds token {tokens.max()}, outside the tokenizer's {tokenizer.vocab_size}. "
            "Name the tokenizer that the shard was made with."
        )
    return np.bincount(tokens, minlength=tokenizer.vocab_size)


def _bytes_and_tokens(entry: ShardEntry, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """(bytes of text, its tokens, documents) of some documents of a shard that no manifest describes."""
    size = tokens = read = 0
    for _, document in some_documents(entry.prefix, _SAMPLED):
        own = without_separator(document, tokenizer.eod)
        size += len(tokenizer.decode(own.tolist()).encode())
        tokens += len(own)
        read += 1
    return size, tokens, read


def measure_coverage(entries: Sequence[ShardEntry], tokenizer: Tokenizer, show: bool = False) -> list[Coverage]:
    """Count the tokens of each source, all its shards together. Reads every token once.

    Raises ``DataError`` for a damaged shard and for ids that the tokenizer does not have.
    """
    return [
        _of_source(source, [entry for entry in entries if entry.source == source], tokenizer, show)
        for source in dict.fromkeys(entry.source for entry in entries)
    ]


def _of_source(source: str, entries: Sequence[ShardEntry], tokenizer: Tokenizer, show: bool) -> Coverage:
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    total = size = tokens = measured = 0
    for entry in entries:
        own = _read(entry, tokenizer, show)
        counts += own
        number = read_header(entry.prefix).entries - 1
        total += number
        if entry.bytes is None:
            found = _bytes_and_tokens(entry, tokenizer)
        else:
            found = (entry.bytes, int(own.sum()) - int(own[tokenizer.eod]), number)
        size, tokens, measured = size + found[0], tokens + found[1], measured + found[2]
    return Coverage(source, total, counts, size / max(1, tokens), measured)


def coverage_facts(found: Sequence[Coverage], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """As JSON can hold it; ``most_frequent`` has (id, piece, occurrences), ``fallback`` is without line feeds."""
    return [_facts(coverage, tokenizer) for coverage in found]


def _facts(coverage: Coverage, tokenizer: Tokenizer) -> dict[str, Any]:
    fallback, unknown = [], []
    if isinstance(tokenizer, FileTokenizer):
        # SentencePiece models spell a line feed as its byte as a rule; it is not what a vocabulary lacks.
        fallback = sorted(i for i in tokenizer.fallback_ids if tokenizer.piece(i) != _LINE_FEED)
        unknown = [] if tokenizer.unknown_id is None else [tokenizer.unknown_id]
    frequent = np.argsort(-coverage.counts, kind="stable")[:FREQUENT].tolist()
    used = int((coverage.counts > 0).sum())
    return {
        "source": coverage.source,
        "documents": coverage.documents,
        "tokens": coverage.tokens,
        "bytes_per_token": coverage.bytes_per_token,
        "bytes_measured_on_documents": coverage.measured_on,
        "vocabulary_used": used / tokenizer.vocab_size,
        "tokens_never_seen": tokenizer.vocab_size - used,
        "fallback": coverage.share(fallback),
        "unknown": coverage.share(unknown),
        "most_frequent": [(i, tokenizer.piece(i), int(coverage.counts[i])) for i in frequent if coverage.counts[i]],
    }


def coverage_table(facts: Sequence[dict[str, Any]]) -> str:
    """One row per source, then the most frequent tokens of each."""
    titles = [
        "source",
        "documents",
        "tokens",
        "bytes per token",
        "vocabulary used",
        "never seen",
        "fallback",
        "unknown",
    ]
    rows = [
        [
            *(f[key] for key in ("source", "documents", "tokens", "bytes_per_token")),
            percent(f["vocabulary_used"]),
            f["tokens_never_seen"],
            *(percent(f[key]) for key in ("fallback", "unknown")),
        ]
        for f in facts
    ]
    lines = [table(titles, rows), ""]
    for f in facts:
        frequent = "  ".join(f"{excerpt(piece, 20)} {percent(n / f['tokens'])}" for _, piece, n in f["most_frequent"])
        lines.append(f"{f['source']}, most frequent: {frequent}")
        if f["bytes_measured_on_documents"] < f["documents"]:
            lines.append(f"{f['source']}: bytes per token are of {f['bytes_measured_on_documents']:,} documents")
    return "\n".join(lines)
