"""Writes ``.bin``/``.idx`` pairs, byte for byte as megatron-core's builder, but to be continued after a kill.

That builder keeps the length of every document in a Python list until the end (gigabytes for 10^8 documents) and can
only begin anew. Here the lengths go to a file beside the tokens, so that memory does not grow and a writer takes up
where both files are known to be sound.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.shards import HEADER, MAGIC, dtype_code, shard_paths, token_dtype

_LENGTH = np.dtype("<i4")
LENGTHS_SUFFIX = ".lengths"
_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Written:
    """How much of a shard is on the disk."""

    documents: int = 0
    tokens: int = 0


class ShardWriter:
    """Appends documents to one shard. Nothing can be read before ``finish``.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``; a third file, ``.lengths``, is of use to writers only.
        vocab_size: decides the dtype; ids at or above it are refused.
        at: what an earlier writer's ``sync`` told; everything after it is cut off.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, at: Written | None = None) -> None:
        self._bin_path, self._idx_path = shard_paths(prefix)
        self._lengths_path = Path(f"{prefix}{LENGTHS_SUFFIX}")
        self._vocab_size, self._dtype = vocab_size, np.dtype(token_dtype(vocab_size)).newbyteorder("<")
        at = at or Written()
        self.documents, self.tokens = at.documents, at.tokens
        self._bin = _opened(self._bin_path, at.tokens * self._dtype.itemsize)
        self._lengths = _opened(self._lengths_path, at.documents * _LENGTH.itemsize)

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document."""
        document = np.asarray(ids, dtype=np.int64)
        self.extend(document, np.array([document.size]))

    def extend(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their tokens one after another, and the length of each.

        Raises ``DataError`` for an id outside the vocabulary, which the dtype could not hold.
        """
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size):
            raise DataError(f"{self._bin_path}: a token id lies outside the vocabulary of {self._vocab_size}.")
        self._bin.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.write(np.ascontiguousarray(lengths, dtype=_LENGTH).data)
        self.documents += len(lengths)
        self.tokens += tokens.size

    def sync(self) -> Written:
        """Flush to the disk; what is told can be gone back to."""
        for stream in (self._bin, self._lengths):
            stream.flush()
            os.fsync(stream.fileno())
        return Written(self.documents, self.tokens)

    def finish(self) -> None:
        """Write the index, and close. The file of lengths stays, so that finishing can be repeated."""
        self.sync()
        self.close()
        with self._idx_path.open("wb") as index:
            index.write(HEADER.pack(MAGIC, 1, dtype_code(self._dtype), self.documents, self.documents + 1))
            for part in self._index_parts():
                index.write(part.data)
            index.flush()
            os.fsync(index.fileno())

    def close(self) -> None:
        """Close both files."""
        self._bin.close()
        self._lengths.close()

    def _index_parts(self) -> Iterator[np.ndarray]:
        yield from self._stored_lengths()
        end = 0
        for lengths in self._stored_lengths():
            ends = end + np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
            yield ends - lengths.astype("<i8") * self._dtype.itemsize
            end = int(ends[-1])
        for begin in range(0, self.documents + 1, _AT_ONCE):
            yield np.arange(begin, min(begin + _AT_ONCE, self.documents + 1), dtype="<i8")

    def _stored_lengths(self) -> Iterator[np.ndarray]:
        with self._lengths_path.open("rb") as stream:
            while raw := stream.read(_AT_ONCE * _LENGTH.itemsize):
                yield np.frombuffer(raw, dtype=_LENGTH)


def _opened(path: Path, size: int) -> IO[bytes]:
    """The file, cut to ``size`` bytes, to be appended to. ``DataError`` where it is shorter."""
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise DataError(f"{path}: {found} bytes where {size} had been written. Remove its folder and begin anew.")
    stream = path.open("r+b" if path.exists() else "w+b")
    stream.truncate(size)
    stream.seek(size)
    return stream
