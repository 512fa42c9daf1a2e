"""Whether an ``.idx`` file is whole and belongs to its ``.bin`` file. Reads it a piece at a time, whatever its size."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.shards.layout import HEADER, INTEGER_CODES, MAGIC, SUFFIXES, shard_paths

_AT_ONCE = 1 << 18
_REBUILD = "Prepare the corpus again, or copy both files again from where they were built."


class Header(NamedTuple):
    """What an index says of itself.

    Attributes:
        dtype: of the tokens.
        sequences: entries of the lengths and of the pointers.
        entries: of the document index, one more than there are documents.
    """

    dtype: np.dtype
    sequences: int
    entries: int

    @property
    def pointers_at(self) -> int:
        """First byte of the pointers, int64 [sequences]."""
        return HEADER.size + 4 * self.sequences

    @property
    def boundaries_at(self) -> int:
        """First byte of the document index, int64 [entries]."""
        return self.pointers_at + 8 * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the whole index."""
        return self.boundaries_at + 8 * self.entries


def read_header(prefix: str | Path) -> Header:
    """The header of a shard's index.

    Raises:
        DataError: a file is missing, of another format, truncated, or holds nothing.
    """
    bin_path, idx_path = shard_paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise _absent(Path(prefix), path)
    with idx_path.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise DataError(f"{idx_path}: not an MMIDIDX index, the format of Megatron and GPT-NeoX (data_impl mmap).")
    if len(raw) < HEADER.size:
        raise DataError(f"{idx_path}: truncated within its header. {_REBUILD}")
    _, version, code, sequences, entries = HEADER.unpack(raw)
    if version != 1 or code not in INTEGER_CODES:
        raise DataError(f"{idx_path}: version {version} with dtype code {code} is not one that holds tokens.")
    header, actual = Header(np.dtype(INTEGER_CODES[code]), sequences, entries), idx_path.stat().st_size
    if header.size != actual:
        raise DataError(f"{idx_path}: truncated or foreign, {actual} bytes where {header.size} are due. {_REBUILD}")
    if not sequences or entries < 2 or not bin_path.stat().st_size:
        raise DataError(f"{prefix}: the shard holds no token. {_REBUILD}")
    return header


def _absent(prefix: Path, path: Path) -> DataError:
    if prefix.suffix in SUFFIXES and prefix.is_file():
        return DataError(f"{prefix}: is one of the two files of a shard; give the path without {prefix.suffix}.")
    return DataError(
        f"{path}: no such file. A shard is a .bin and an .idx file; give their path without the ending, "
        "and prepare the corpus first (python tools/prepare_data.py --help)."
    )


def check_index(prefix: str | Path, header: Header) -> bool:
    """Check that the documents fill the ``.bin`` file one after another; returns whether each is one sequence.

    Raises:
        DataError: they do not, or the file has another size than the index tells of.
    """
    bin_path, idx_path = shard_paths(prefix)
    end, actual = _end_of_sequences(idx_path, header), bin_path.stat().st_size
    if end != actual:
        raise DataError(f"{bin_path}: {actual} bytes where its index tells of {end}. {_REBUILD}")
    return _one_sequence_each(idx_path, header)


def _end_of_sequences(idx_path: Path, header: Header) -> int:
    """The byte at which the last sequence ends."""
    end = 0
    lengths = _pieces(idx_path, np.dtype("<i4"), HEADER.size, header.sequences)
    pointers = _pieces(idx_path, np.dtype("<i8"), header.pointers_at, header.sequences)
    for length, pointer in zip(lengths, pointers, strict=True):
        ends = np.cumsum(length, dtype=np.int64)
        ends *= header.dtype.itemsize
        ends += end
        if length.min() < 0 or pointer[0] != end or not np.array_equal(pointer[1:], ends[:-1]):
            raise DataError(f"{idx_path}: the documents do not follow one another without gaps. {_REBUILD}")
        end = int(ends[-1])
    return end


def _one_sequence_each(idx_path: Path, header: Header) -> bool:
    """Whether document d is sequence d; the document index must not fall, and run from 0 to the last sequence."""
    first, last, plain = 0, 0, header.entries == header.sequences + 1
    for number, piece in enumerate(_pieces(idx_path, np.dtype("<i8"), header.boundaries_at, header.entries)):
        first = int(piece[0]) if number == 0 else first
        if piece[0] < last or (piece[1:] < piece[:-1]).any():
            raise DataError(f"{idx_path}: the document index is out of order. {_REBUILD}")
        begin = number * _AT_ONCE
        plain = plain and np.array_equal(piece, np.arange(begin, begin + len(piece)))
        last = int(piece[-1])
    if first != 0 or last != header.sequences:
        raise DataError(f"{idx_path}: the document index is out of order. {_REBUILD}")
    return plain


def _pieces(path: Path, dtype: np.dtype, offset: int, count: int) -> Iterator[np.ndarray]:
    """``count`` numbers from byte ``offset`` on, by files' reads: a memory map would count them all as ours, and the
    format puts them at odd addresses, where arithmetic is slow.
    """
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        for begin, stop in pairwise([*range(0, count, _AT_ONCE), count]):
            piece = np.fromfile(stream, dtype=dtype, count=stop - begin)
            if len(piece) < stop - begin:
                raise DataError(f"{path}: became shorter while it was read. {_REBUILD}")
            yield piece
