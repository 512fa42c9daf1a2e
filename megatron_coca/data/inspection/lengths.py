"""How long documents are, from the indices alone."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection.collection import Entry
from megatron_coca.data.inspection.index import document_lengths
from megatron_coca.data.inspection.table import percent, table

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


def lengths_by_source(entries: Sequence[Entry]) -> dict[str, Lengths]:
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
