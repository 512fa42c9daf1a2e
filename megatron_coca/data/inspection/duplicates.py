"""Documents that occur more than once, within shards and across them, by a hash of their tokens."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.inspection.buckets import KEPT, begins_document, hashed, order
from megatron_coca.data.inspection.collection import Entry
from megatron_coca.data.inspection.table import excerpt, percent, table
from megatron_coca.data.shards.index import read_header
from megatron_coca.data.shards.shard import Shard
from megatron_coca.data.tokenizers.kinds import Tokenizer

SHOWN = KEPT


@dataclass(frozen=True)
class Repeated:
    """A document that occurs more than once: how often, its length in tokens, and (entry, number) of some places."""

    copies: int
    tokens: int
    places: list[tuple[int, int]]


@dataclass
class Duplicates:
    """What was found among the shards ``entries``.

    Attributes:
        extra: copies after the first in each shard, int64 [entries].
        extra_tokens: their tokens.
        shared: different documents that both of two shards hold, int64 [entries, entries]; the diagonal is unused.
        worst: those whose copies have the most tokens.
    """

    entries: Sequence[Entry]
    documents: list[int]
    tokens: list[int]
    extra: np.ndarray
    extra_tokens: np.ndarray
    shared: np.ndarray
    worst: list[Repeated] = field(default_factory=list)

    def pairs(self, leaks: bool = False) -> list[tuple[int, int, int]]:
        """(entry, entry, documents in both) of shards that share any; with ``leaks`` only of different splits."""
        found = [(int(a), int(b), int(self.shared[a, b])) for a, b in np.argwhere(np.triu(self.shared, 1))]
        return [pair for pair in found if not leaks or self._leak(pair)]

    def _leak(self, pair: tuple[int, int, int]) -> bool:
        return self.entries[pair[0]].split != self.entries[pair[1]].split

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it."""
        columns = zip(self.entries, self.documents, self.tokens, self.extra, self.extra_tokens, strict=True)
        return {
            "shards": [
                {"prefix": e.prefix, "documents": d, "tokens": t, "duplicates": n, "duplicate_tokens": m}
                for e, d, t, n, m in columns
            ],
            "shared": [
                [self.entries[a].prefix, self.entries[b].prefix, n, self._leak((a, b, n))] for a, b, n in self.pairs()
            ],
            "worst": [
                {"copies": w.copies, "tokens": w.tokens, "places": [[self.entries[e].prefix, n] for e, n in w.places]}
                for w in self.worst
            ],
        }


def find_duplicates(entries: Sequence[Entry], show: bool = False, workplace: Path | None = None) -> Duplicates:
    """Compare all documents of all shards. Reads every token once.

    Memory holds some 8 MB of hashes and a column of counters per shard at a time, however many documents there are and
    however often one is repeated; a temporary folder, in ``workplace`` where given, holds up to 28 bytes a document.
    Raises ``DataError`` for a damaged shard.
    """
    counts = [read_header(entry.prefix).entries - 1 for entry in entries]
    firsts = np.cumsum([0, *counts])
    size = len(entries)
    found = Duplicates(
        entries,
        counts,
        [Shard(entry.prefix).len_tokens for entry in entries],
        np.zeros(size, np.int64),
        np.zeros(size, np.int64),
        np.zeros((size, size), np.int64),
    )
    with tempfile.TemporaryDirectory(dir=workplace) as folder:
        for records in hashed(entries, firsts, Path(folder), show):
            _compare(records, firsts, found)
    return found


def _compare(records: np.ndarray, firsts: np.ndarray, found: Duplicates) -> None:
    """Add what the records of some documents, all of each, tell to ``found``."""
    records = records[order(records)]
    group = np.cumsum(begins_document(records)) - 1
    kept = np.bincount(group)[group] > 1  # of what was folded, KEPT records are left at least
    records = records[kept]
    if not len(records):
        return
    _, begins, group, sizes = np.unique(group[kept], return_index=True, return_inverse=True, return_counts=True)
    entry = np.searchsorted(firsts, records["number"].astype(np.int64), side="right") - 1
    held = np.zeros((len(begins), len(found.entries)), dtype=np.int64)
    np.add.at(held, (group, entry), records["copies"].astype(np.int64))
    tokens = records["tokens"][begins].astype(np.int64)
    extra = np.maximum(held - 1, 0)
    found.extra += extra.sum(axis=0)
    found.extra_tokens += tokens @ extra
    found.shared += (held > 0).T.astype(np.int64) @ (held > 0)
    copies = held.sum(axis=1)
    worst = np.argsort(-tokens * (copies - 1), kind="stable")[:SHOWN]
    for number in worst.tolist():
        members = range(int(begins[number]), int(begins[number] + min(sizes[number], SHOWN)))
        places = [(int(entry[i]), int(records["number"][i]) - int(firsts[entry[i]])) for i in members]
        found.worst.append(Repeated(int(copies[number]), int(tokens[number]), places))
    found.worst.sort(key=lambda repeated: -repeated.tokens * (repeated.copies - 1))
    del found.worst[SHOWN:]


def duplicates_table(found: Duplicates, tokenizer: Tokenizer | None) -> str:
    """Duplicates within shards, documents that shards share (leaks marked), and the worst of them."""
    columns = zip(found.entries, found.documents, found.tokens, found.extra, found.extra_tokens, strict=True)
    within = [
        [e.label, d, int(n), percent(int(n) / d), int(m), percent(int(m) / max(1, t))] for e, d, t, n, m in columns
    ]
    text = [table(["within", "documents", "duplicates", "share", "their tokens", "share"], within)]
    leaks = found.pairs(leaks=True)
    shared = [
        [f"{found.entries[a].label}, {found.entries[b].label}", n, "leak" if (a, b, n) in leaks else ""]
        for a, b, n in found.pairs()
    ]
    text.append(table(["in both", "documents", ""], shared) if shared else "no document is in two shards")
    text += [_repeated_line(repeated, found, tokenizer) for repeated in found.worst]
    return "\n\n".join(text)


def _repeated_line(repeated: Repeated, found: Duplicates, tokenizer: Tokenizer | None) -> str:
    places = ", ".join(f"{found.entries[entry].label}:{number}" for entry, number in repeated.places)
    entry, number = repeated.places[0]
    tokens = Shard(found.entries[entry].prefix).document(number)[:200]
    shown = excerpt(tokenizer.decode(tokens.tolist())) if tokenizer else f"tokens {tokens[:10].tolist()}"
    more = ", ..." if repeated.copies > len(repeated.places) else ""
    return f"{repeated.copies} x {repeated.tokens:,} tokens: {places}{more}\n  {shown}"
