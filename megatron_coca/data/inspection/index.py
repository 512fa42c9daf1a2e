"""Lengths of documents out of an ``.idx`` file, a piece at a time, whatever its size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_coca.data.shards.index import check_index, read_header
from megatron_coca.data.shards.layout import HEADER, shard_paths

_AT_ONCE = 1 << 18


class DocumentEnds:
    """Where the documents of a shard end, read along with its tokens.

    Attributes:
        empty: documents without any token, among those that were read.
    """

    def __init__(self, prefix: Path) -> None:
        self._lengths = document_lengths(prefix)
        self._waiting = np.empty(0, dtype=np.int64)
        self._read = self.empty = 0

    def before(self, place: int) -> np.ndarray:
        """Last tokens of further documents, those that lie before token ``place``: int64 [any]."""
        while not len(self._waiting) or self._waiting[-1] < place:
            lengths = next(self._lengths, None)
            if lengths is None:
                break
            ends = self._read + np.cumsum(lengths)
            self._read, self.empty = int(ends[-1]), self.empty + int((lengths == 0).sum())
            self._waiting = np.concatenate((self._waiting, ends[lengths > 0] - 1))
        count = int(np.searchsorted(self._waiting, place))
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken


def document_lengths(prefix: Path) -> Iterator[np.ndarray]:
    """Tokens of each document in order, with the one that ends it: int64, some at a time.

    Raises:
        DataError: a file is missing, truncated, of another format, or the two do not belong together.
    """
    header = read_header(prefix)
    one_sequence_each = check_index(prefix, header)
    path, documents = shard_paths(prefix)[1], header.entries - 1
    sequences = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(header.sequences,))
    boundaries = np.memmap(path, dtype="<i8", mode="r", offset=header.boundaries_at, shape=(header.entries,))
    for begin in range(0, documents, _AT_ONCE):
        end = min(begin + _AT_ONCE, documents)
        if one_sequence_each:
            yield sequences[begin:end].astype(np.int64)
        else:
            edges = np.array(boundaries[begin : end + 1])
            # A document of no sequence has no token, which reduceat cannot express.
            sums = np.concatenate(([0], np.cumsum(sequences[edges[0] : edges[-1]], dtype=np.int64)))
            yield np.diff(sums[edges - edges[0]])
