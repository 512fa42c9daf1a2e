"""Lengths of documents out of an ``.idx`` file, a piece at a time, whatever its size."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_coca.data.shards.index import check_index, read_header
from megatron_coca.data.shards.layout import HEADER, shard_paths

_AT_ONCE = 1 << 18


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
