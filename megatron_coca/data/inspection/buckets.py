"""Hashes of all documents, brought together by hash through files, so that memory holds few at a time."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
from tqdm import tqdm

from megatron_coca.data.inspection.collection import Entry, documents

# 96 bits of hash: among 10^9 documents two different ones agree with a probability of 10^-11.
RECORD = np.dtype([("high", "<u8"), ("low", "<u4"), ("tokens", "<u4"), ("number", "<u8"), ("copies", "<u4")])
_BUCKET_DOCUMENTS = 1 << 18
_MOST_BUCKETS = 256  # files open at once
_BUFFERED = 1 << 15  # records, before they are told apart by bucket
KEPT = 10
"""Records that are kept of a document, however often it occurs."""


def hashed(entries: Sequence[Entry], firsts: np.ndarray, folder: Path, show: bool) -> Iterator[np.ndarray]:
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


def _records(entry: Entry, first: int) -> Iterator[np.ndarray]:
    buffered: list[tuple[int, int, int, int, int]] = []
    for number, tokens in enumerate(documents(entry.prefix), start=first):
        digest = hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=12).digest()
        high, low = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
        buffered.append((high, low, len(tokens), number, 1))
        if len(buffered) == _BUFFERED:
            yield np.array(buffered, dtype=RECORD)
            buffered.clear()
    yield np.array(buffered, dtype=RECORD)
