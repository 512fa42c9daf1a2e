"""Tokenized documents on disk: ``.bin``/``.idx`` pairs, how they are laid out, checked, read and written."""

import copy
import hashlib
import mmap
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from megatron_coca.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
INTEGER_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""The dtypes that hold tokens."""
SUFFIXES = (".bin", ".idx")


def shard_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The two files of a shard."""
    tokens, index = (Path(f"{prefix}{suffix}") for suffix in SUFFIXES)
    return tokens, index


def token_dtype(vocab_size: int) -> type[np.integer]:
    """uint16 for fewer than 65,500 ids, else int32: GPT-NeoX's rule."""
    return np.uint16 if vocab_size < 65500 else np.int32


def dtype_code(dtype: np.dtype) -> int:
    """The number that stands for a dtype in the header."""
    return next(code for code, known in INTEGER_CODES.items() if np.dtype(known) == dtype.newbyteorder("="))


_AT_ONCE = 1 << 18
_REBUILD = "Prepare the corpus again, or copy both files again from where they were built."


class ShardHeader(NamedTuple):
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


def read_header(prefix: str | Path) -> ShardHeader:
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
    header, actual = ShardHeader(np.dtype(INTEGER_CODES[code]), sequences, entries), idx_path.stat().st_size
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


def check_index(prefix: str | Path, header: ShardHeader) -> bool:
    """Check that the documents fill the ``.bin`` file one after another; returns whether each is one sequence.

    Raises:
        DataError: they do not, or the file has another size than the index tells of.
    """
    bin_path, idx_path = shard_paths(prefix)
    end, actual = _end_of_sequences(idx_path, header), bin_path.stat().st_size
    if end != actual:
        raise DataError(f"{bin_path}: {actual} bytes where its index tells of {end}. {_REBUILD}")
    return _one_sequence_each(idx_path, header)


def _end_of_sequences(idx_path: Path, header: ShardHeader) -> int:
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


def _one_sequence_each(idx_path: Path, header: ShardHeader) -> bool:
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


class Shard:
    """A ``.bin``/``.idx`` pair, opened for reading and checked.

    Opening reads the whole index once, a piece at a time; after that the index and the tokens are memory maps, and a
    process holds nothing of their size. The size of the tokens' file is checked, its content is not read: altered
    tokens are found by ``verify_shards`` (``tools/inspect_data.py verify``), which reads all of it.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, truncated, of another format, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        header = read_header(prefix)
        self._one_sequence_each = check_index(prefix, header)
        self.dtype = header.dtype
        bin_path, idx_path = shard_paths(prefix)
        self._index_map = _mapped(idx_path)
        index = np.frombuffer(self._index_map, dtype=np.uint8)
        self._starts = index[header.pointers_at : header.boundaries_at].view("<i8")
        self._boundaries = index[header.boundaries_at :].view("<i8")
        self._map = _mapped(bin_path)
        self._tokens = np.frombuffer(self._map, dtype=self.dtype)
        self.len_tokens = self._file_tokens = len(self._tokens)
        self.documents = self._file_documents = header.entries - 1
        self._first_document = self._first_token = 0

    def part(self, first: int, last: int) -> Self:
        """The documents from ``first`` up to but not ``last`` as a shard of their own, on the same memory map."""
        if not 0 <= first < last <= self.documents:
            raise DataError(f"{self.prefix}: documents {first} to {last} are not a part of its {self.documents}.")
        begin, end = self._document_offset(first), self._document_offset(last)
        view = copy.copy(self)
        view._first_document = self._first_document + first
        view._first_token = self._first_token + begin
        view.documents, view.len_tokens = last - first, end - begin
        return view

    def __repr__(self) -> str:
        return f"Shard({str(self.prefix)!r}: {self.documents} documents, {self.len_tokens} tokens)"

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int64 [length], with the id that ends it where the shard was prepared with one."""
        if not 0 <= index < self.documents:
            raise DataError(f"{self.prefix}: no document {index}; the shard has {self.documents}.")
        self._check_size()
        begin, end = self._document_offset(index), self._document_offset(index + 1)
        return self.tokens(begin, end - begin)

    def tokens(self, offset: int, count: int) -> np.ndarray:
        """``count`` tokens from ``offset`` on, across documents: int64 [count], a copy."""
        if count < 0:
            raise DataError(f"{self.prefix}: {count} tokens cannot be read; count them from 0 on.")
        return self.windows(np.array([offset]), count)[0].astype(np.int64)

    def windows(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """``count`` tokens from each of ``offsets`` [n] on, across documents: [n, count] in the shard's dtype, a copy."""
        starts = self._within_file(offsets, count)
        if not count:
            return np.empty((len(starts), 0), dtype=self.dtype)
        self._check_size()
        self._fetch(starts, count)
        return sliding_window_view(self._tokens, count)[starts]

    def _fetch(self, starts: np.ndarray, count: int) -> None:
        """Ask the kernel for all pages of several windows at once: from a disk, page faults would wait for each window
        in turn, and read a wide neighbourhood with it.
        """
        if len(starts) < 2:
            return
        begins = starts * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        lengths = (starts + count) * self.dtype.itemsize - begins
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            self._map.madvise(mmap.MADV_WILLNEED, begin, length)

    def document_begins(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """Which of the ``count`` tokens from each of ``offsets`` [n] on are the first of a document: bool [n, count].

        Looks in the index, not for a token that ends documents: shards of other programs may have none.
        """
        starts = self._within_file(offsets, count)
        self._check_size()
        first, stop = np.split(self._documents_before(np.concatenate((starts, starts + count))), 2)
        found = stop - first
        rows = np.repeat(np.arange(len(starts)), found)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(found) - found, found)
        begins = np.zeros((len(starts), count), dtype=bool)
        begins[rows, self._document_starts(first[rows] + within) - starts[rows]] = True
        return begins

    def _check_size(self) -> None:
        """Raise ``DataError`` where a file is shorter than it was when it was opened: reading what is gone from a memory
        map ends the process with SIGBUS. Two system calls, once for all windows of a batch.
        """
        if self._map.size() >= len(self._map) and self._index_map.size() >= len(self._index_map):
            return
        for path, mapped in zip(shard_paths(self.prefix), (self._map, self._index_map), strict=True):
            if (size := mapped.size()) < len(mapped):
                raise DataError(
                    f"{path}: has {size} bytes, and had {len(mapped)} when it was opened: it was truncated while it was "
                    "in use. Copy the shard again from where it was built, then resume."
                )

    def _within_file(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """The file's own numbers of tokens, given this part's; all of the ``count`` from there on must lie in it."""
        outside = np.flatnonzero((offsets < 0) | (offsets + count > self.len_tokens))
        if outside.size:
            offset = int(offsets[outside[0]])
            raise DataError(
                f"{self.prefix}: tokens {offset} to {offset + count} lie outside its {self.len_tokens} tokens."
            )
        return offsets + self._first_token

    def _document_offset(self, index: int) -> int:
        """The shard's own number of the first token of a document, or of the end for ``index`` == ``documents``."""
        return int(self._document_starts(np.array([self._first_document + index]))[0]) - self._first_token

    def _document_starts(self, documents: np.ndarray) -> np.ndarray:
        """First token of documents by their number in the file, and the end of the file for the number after the last
        one: int64 [n] to int64 [n].
        """
        sequences = documents if self._one_sequence_each else self._boundaries[documents]
        last = len(self._starts) - 1
        starts = self._starts[np.minimum(sequences, last)] // self.dtype.itemsize
        return np.where(sequences > last, self._file_tokens, starts)

    def _documents_before(self, tokens: np.ndarray) -> np.ndarray:
        """How many documents of the file begin before each token: int64 [n] to int64 [n].

        A bisection of all at once. np.searchsorted would copy the index at every call: the format puts it at odd
        addresses.
        """
        low = np.zeros(len(tokens), dtype=np.int64)
        high = np.full(len(tokens), self._file_documents, dtype=np.int64)
        for _ in range(self._file_documents.bit_length()):
            middle = (low + high) // 2
            before = (self._document_starts(middle) < tokens) & (low < high)
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        return low


def _mapped(path: Path) -> mmap.mmap:
    """A file that is not empty as a memory map, which keeps the file open and knows its present size."""
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


_WINDOWS = 64
_TOKENS = 4096


def sampled_digest(shard: Shard) -> str:
    """SHA-256 of tokens and beginnings of documents in ``_WINDOWS`` stretches spread evenly over a shard or its part.

    Reads half a megabyte to two, whatever the size: another corpus is told apart, a change between the stretches is
    not. It is the same for the same tokens in another dtype, under another name and without a manifest.
    """
    count = min(_TOKENS, shard.len_tokens)
    offsets = np.unique(np.linspace(0, shard.len_tokens - count, _WINDOWS).astype(np.int64))
    digest = hashlib.sha256(f"{shard.documents} {shard.len_tokens}".encode())
    digest.update(shard.windows(offsets, count).astype("<i8").tobytes())
    digest.update(np.packbits(shard.document_begins(offsets, count)).tobytes())
    return digest.hexdigest()
