"""Documents that occur more than once, within shards and across them, by a hash of their tokens."""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from megatron_coca.data.inspection.collection import ShardEntry, documents
from megatron_coca.data.shards import Shard, read_header
from megatron_coca.data.tokenizers.kinds import Tokenizer
from megatron_coca.tables import excerpt, percent, table

# 96 bits of hash: among 10^9 documents two different ones agree with a probability of 10^-11.
RECORD = np.dtype([("high", "<u8"), ("low", "<u4"), ("tokens", "<u4"), ("number", "<u8"), ("copies", "<u4")])
_BUCKET_DOCUMENTS = 1 << 18
_MOST_BUCKETS = 256  # files open at once
_BUFFERED = 1 << 15  # records, before they are told apart by bucket
KEPT = 10
"""Records that are kept of a document, however often it occurs."""


def hashed(entries: Sequence[ShardEntry], firsts: np.ndarray, folder: Path, show: bool) -> Iterator[np.ndarray]:
    """Records of all documents, those with equal hashes in one portion: ``RECORD`` [any] at a time.

    ``firsts`` numbers the documents of all shards: the first of each, and their number, int64 [entries + 1]. A document
    that occurs more than ``KEPT`` times may have fewer records, but never fewer than that, and the first ``KEPT``
    places are among them; ``copies`` sums up to all. ``folder`` takes the buckets.
    """
    buckets = min(_MOST_BUCKETS, max(1, -(-int(firsts[-1]) // _BUCKET_DOCUMENTS)))
    with ExitStack() as stack, tqdm(total=int(firsts[-1]), unit=" documents", disable=not show) as bar:
        files = [stack.enter_context((folder / str(number)).open("w+b")) for number in range(buckets)]
        for entry_number, entry in enumerate(entries):
            bar.set_description(f"hash {entry.label}")
            for records in _records(entry, int(firsts[entry_number])):
                bar.update(len(records))
                records = _folded(records)
                chosen = records["high"] % np.uint64(buckets)
                for bucket in np.unique(chosen).tolist():
                    records[chosen == bucket].tofile(files[bucket])
        for file in files:
            yield from _portions(file, buckets)


def _folded(records: np.ndarray) -> np.ndarray:
    """Records in the order of their hashes; of a document that occurs more than ``KEPT`` times among them, that many
    stay, the last of which counts for the rest. Equal documents all go to one bucket, which they would fill.
    """
    records = records[order(records)]
    begins = np.flatnonzero(begins_document(records))
    sizes = np.diff(begins, append=len(records))
    rank = np.arange(len(records)) - np.repeat(begins, sizes)
    records["copies"] = np.where(rank == KEPT - 1, np.repeat(sizes, sizes) - rank, 1)
    return records[rank < KEPT]


def order(records: np.ndarray) -> np.ndarray:
    """Equal documents one after another, by number: indices, int64 [n]."""
    return np.lexsort((records["number"], records["low"], records["high"]))


def begins_document(records: np.ndarray) -> np.ndarray:
    """Which records in that order are another document than the one before: bool [n]."""
    same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
    return np.concatenate((np.ones(min(1, len(records)), dtype=bool), ~same))


def _portions(file: IO[bytes], buckets: int) -> Iterator[np.ndarray]:
    """A bucket's records, those with equal hashes in one portion of some ``_BUCKET_DOCUMENTS``; a bucket of more is
    read once for each.
    """
    count = file.seek(0, os.SEEK_END) // RECORD.itemsize
    portions = -(-count // _BUCKET_DOCUMENTS)
    for number in range(portions):
        file.seek(0)
        read = [np.empty(0, dtype=RECORD)]
        while len(records := np.fromfile(file, dtype=RECORD, count=_BUCKET_DOCUMENTS)):
            read.append(records[records["high"] // np.uint64(buckets) % np.uint64(portions) == number])
        yield np.concatenate(read)


def _records(entry: ShardEntry, first: int) -> Iterator[np.ndarray]:
    buffered: list[tuple[int, int, int, int, int]] = []
    for number, tokens in enumerate(documents(entry.prefix), start=first):
        digest = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=12).digest()
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        buffered.append((high, low, len(tokens), number, 1))
        if len(buffered) == _BUFFERED:
            yield np.array(buffered, dtype=RECORD)
            buffered.clear()
    yield np.array(buffered, dtype=RECORD)


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

    entries: Sequence[ShardEntry]
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


def find_duplicates(entries: Sequence[ShardEntry], show: bool = False, workplace: Path | None = None) -> Duplicates:
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
