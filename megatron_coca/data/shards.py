"""Shards: tokenized documents on disk in `.bin`/`.idx` pairs, the format of Megatron and GPT-NeoX."""

import copy
import errno
import hashlib
import mmap
import struct
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from megatron_coca.data.errors import DataError
from megatron_coca.data.remote_shards import NOTE, RemoteTokens, remote_size
from megatron_coca.support.open_files import TOO_MANY_FILES

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
INTEGER_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
SUFFIXES = (".bin", ".idx")
MASKED = -100
"""The label of a token that does not count in the loss, as in GPT-NeoX and PyTorch. All negative labels have this
meaning.
"""


def shard_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths of the `.bin` and `.idx` files of a shard."""
    tokens, index = (Path(f"{prefix}{suffix}") for suffix in SUFFIXES)
    return tokens, index


def token_dtype(vocab_size: int) -> type[np.integer]:
    """Return uint16 for fewer than 65,500 ids, else int32, as in GPT-NeoX."""
    return np.uint16 if vocab_size < 65500 else np.int32


def dtype_code(dtype: np.dtype) -> int:
    """Return the code that stands for a dtype in the header of an index file."""
    return next(code for code, known in INTEGER_CODES.items() if np.dtype(known) == dtype.newbyteorder("="))


_BLOCK = 1 << 18
_REBUILD = "prepare the corpus again, or copy both files again"


class ShardHeader(NamedTuple):
    """The header of an index file."""

    dtype: np.dtype  # dtype of the tokens
    sequences: int  # number of sequences, each with a length and a pointer in the index
    entries: int  # number of entries of the document index, which is the number of documents plus one

    @property
    def pointers_at(self) -> int:
        """Offset of the pointers in the file, in bytes. The pointers are int64 [sequences]."""
        return HEADER.size + 4 * self.sequences

    @property
    def boundaries_at(self) -> int:
        """Offset of the document index in the file, in bytes. The document index is int64 [entries]."""
        return self.pointers_at + 8 * self.sequences

    @property
    def size(self) -> int:
        """Size in bytes of the index file."""
        return self.boundaries_at + 8 * self.entries


def read_header(prefix: str | Path) -> ShardHeader:
    """Read the header of a shard. Raises `DataError` if a file is missing, in another format, truncated or empty."""
    bin_path, idx_path = shard_paths(prefix)
    remote = remote_size(bin_path)
    for path in (idx_path,) if remote is not None else (bin_path, idx_path):
        if not path.is_file():
            if Path(prefix).suffix in SUFFIXES and Path(prefix).is_file():
                raise DataError(
                    f"{prefix}: is one of the two files of a shard, not its prefix; give the path without "
                    f"{Path(prefix).suffix}"
                )
            place = "" if path.is_absolute() else f" (relative data paths start at {Path.cwd()})"
            raise DataError(
                f"{path}: no such file{place}; give the path of a shard without .bin or .idx, or prepare the corpus "
                "first (megatron-coca prepare --help)"
            )
    with idx_path.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC[: len(raw)] or not raw:
        raise DataError(
            f"{idx_path}: not an MMIDIDX index file; use shards in the format of Megatron and GPT-NeoX (data_impl mmap)"
        )
    if len(raw) < HEADER.size:
        raise DataError(f"{idx_path}: the header is truncated; {_REBUILD}")
    _, version, code, sequences, entries = HEADER.unpack(raw)
    if version != 1 or code not in INTEGER_CODES:
        raise DataError(
            f"{idx_path}: version {version} with dtype code {code} is not supported; use shards of version 1 with an "
            "integer dtype"
        )
    header, actual = ShardHeader(np.dtype(INTEGER_CODES[code]), sequences, entries), idx_path.stat().st_size
    if header.size != actual:
        raise DataError(
            f"{idx_path}: truncated or in another format ({actual} bytes instead of {header.size}); {_REBUILD}"
        )
    if not sequences or entries < 2 or not _bin_size(bin_path):
        raise DataError(f"{prefix}: contains no tokens; {_REBUILD}")
    return header


def _bin_size(path: Path) -> int:
    size = remote_size(path)
    return path.stat().st_size if size is None else size


def _check_index(prefix: str | Path, header: ShardHeader) -> bool:
    """Check that the documents fill the `.bin` file without gaps. Return True if every document consists of a single
    sequence.

    Raises `DataError` if there is a gap, or if the size of the `.bin` file differs from the size that the index
    records.
    """
    bin_path, idx_path = shard_paths(prefix)
    end = 0
    lengths = _read_array(idx_path, np.dtype("<i4"), HEADER.size, header.sequences)
    pointers = _read_array(idx_path, np.dtype("<i8"), header.pointers_at, header.sequences)
    for length, pointer in zip(lengths, pointers, strict=True):
        ends = np.cumsum(length, dtype=np.int64)
        ends *= header.dtype.itemsize
        ends += end
        if length.min() < 0 or pointer[0] != end or not np.array_equal(pointer[1:], ends[:-1]):
            raise DataError(f"{idx_path}: there are gaps or overlaps between the documents; {_REBUILD}")
        end = int(ends[-1])
    if end != (actual := _bin_size(bin_path)):
        raise DataError(f"{bin_path}: has {actual} bytes, but its index records {end} bytes; {_REBUILD}")
    # The document index must not decrease, and must run from 0 to the number of sequences.
    first, last, one_sequence_each = 0, 0, header.entries == header.sequences + 1
    blocks = _read_array(idx_path, np.dtype("<i8"), header.boundaries_at, header.entries)
    for number, block in enumerate(blocks):
        first = int(block[0]) if number == 0 else first
        if block[0] < last or (block[1:] < block[:-1]).any():
            raise DataError(f"{idx_path}: the document index is out of order; {_REBUILD}")
        begin = number * _BLOCK
        one_sequence_each = one_sequence_each and np.array_equal(block, np.arange(begin, begin + len(block)))
        last = int(block[-1])
    if first != 0 or last != header.sequences:
        raise DataError(f"{idx_path}: the document index is out of order; {_REBUILD}")
    return one_sequence_each


def _read_array(path: Path, dtype: np.dtype, offset: int, count: int) -> Iterator[np.ndarray]:
    """Yield the `count` numbers that begin at byte `offset` of a file, in blocks.

    The file is not memory-mapped, because mapped pages would count as memory of the process. Moreover, the mapped
    numbers would not be aligned, and arithmetic on them would be slow.
    """
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        for begin, stop in pairwise([*range(0, count, _BLOCK), count]):
            block = np.fromfile(stream, dtype=dtype, count=stop - begin)
            if len(block) < stop - begin:
                raise DataError(f"{path}: the file was truncated while it was read; {_REBUILD}")
            yield block


class Shard:
    """A `.bin`/`.idx` pair, opened for reading and checked.

    Opening a shard reads the whole index once, in blocks. After that, index and tokens are read from memory maps. Only
    the size of the `.bin` file is checked; `megatron-coca inspect verify` detects altered tokens.

    `prefix` is the path of the pair without `.bin` and `.idx`. `labels` is the prefix of a label shard. It has the same
    documents, but negative ids in place of the tokens that do not count in the loss. Raises `DataError` if a file is
    missing, truncated or in another format, or if the files do not belong together.
    """

    def __init__(self, prefix: str | Path, labels: str | Path | None = None) -> None:
        self.prefix = Path(prefix)
        try:
            self._open()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise DataError(f"{prefix}: {TOO_MANY_FILES}") from error
        self.labels = None if labels is None else Shard(labels)
        if self.labels is not None and not self._same_documents(self.labels):
            raise DataError(
                f"{labels}: the document lengths differ from those of {prefix}; prepare both shards together"
            )

    def _open(self) -> None:
        prefix = self.prefix
        header = read_header(prefix)
        self._one_sequence_each = _check_index(prefix, header)
        self.dtype = header.dtype
        bin_path, idx_path = shard_paths(prefix)
        self._index_map = _mapped(idx_path)
        index = np.frombuffer(self._index_map, dtype=np.uint8)
        self._starts = index[header.pointers_at : header.boundaries_at].view("<i8")
        self._boundaries = index[header.boundaries_at :].view("<i8")
        self._map, self._tokens = _token_map(bin_path, self.dtype)
        self.len_tokens = self._file_tokens = len(self._tokens)
        self.documents = self._file_documents = header.entries - 1
        self._first_document = self._first_token = 0

    @property
    def name(self) -> str:
        """The prefix of the shard, or its URL if it is on a store."""
        return self._tokens.prefix if isinstance(self._tokens, RemoteTokens) else str(self.prefix)

    def _same_documents(self, other: "Shard") -> bool:
        if (self.documents, self.len_tokens) != (other.documents, other.len_tokens):
            return False
        every = (0, self.documents)
        return np.array_equal(self.document_lengths(*every), other.document_lengths(*every))

    def part(self, first: int, last: int) -> Self:
        """Return documents `first` to `last` (exclusive) as a shard that shares the memory map."""
        if not 0 <= first < last <= self.documents:
            raise DataError(
                f"{self.prefix}: documents {first} to {last} are out of range; the shard has {self.documents} documents"
            )
        begin, end = self._document_offset(first), self._document_offset(last)
        view = copy.copy(self)
        view._first_document = self._first_document + first
        view._first_token = self._first_token + begin
        view.documents, view.len_tokens = last - first, end - begin
        view.labels = None if self.labels is None else self.labels.part(first, last)
        return view

    def __repr__(self) -> str:
        return f"Shard({str(self.prefix)!r}: {self.documents} documents, {self.len_tokens} tokens)"

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, int64 [length], including its separator if the shard has separators."""
        if not 0 <= index < self.documents:
            raise DataError(f"{self.prefix}: document {index} does not exist; the shard has {self.documents} documents")
        self._check_size()
        begin, end = self._document_offset(index), self._document_offset(index + 1)
        return self.tokens(begin, end - begin)

    def largest_id(self) -> int:
        """Read all tokens and return the largest id."""
        blocks = pairwise([*range(0, self.len_tokens, _BLOCK), self.len_tokens])
        return max((int(self.tokens(begin, end - begin).max()) for begin, end in blocks), default=-1)

    def document_lengths(self, first: int, last: int) -> np.ndarray:
        """Return the lengths of documents `first` to `last` (exclusive) in tokens, separators included, int64 [last -
        first].
        """
        self._check_size()
        return np.diff(self._document_starts(self._first_document + np.arange(first, last + 1)))

    def tokens(self, offset: int, count: int) -> np.ndarray:
        """Return a copy of the `count` tokens that start at `offset`, int64 [count]. They may span documents."""
        if count < 0:
            raise DataError(f"{self.prefix}: the number of tokens to read must be at least 0, not {count}")
        return self.windows(np.array([offset]), count)[0].astype(np.int64)

    def windows(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """Return a copy of `count` tokens from each offset in `offsets` [n] on. The result is [n, count] in the shard's
        dtype. Each row may span several documents.
        """
        starts = self._within_file(offsets, count)
        if not count:
            return np.empty((len(starts), 0), dtype=self.dtype)
        self._check_size()
        if isinstance(self._tokens, RemoteTokens):
            return self._tokens.windows(starts, count)
        self._fetch(starts, count)
        return sliding_window_view(self._tokens, count)[starts]

    def _fetch(self, starts: np.ndarray, count: int) -> None:
        """Ask the operating system for the pages of several windows at once. Page faults would read the pages one after
        another, and every page fault would wait for the disk.
        """
        if len(starts) < 2 or self._map is None:
            return
        begins = starts * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        lengths = (starts + count) * self.dtype.itemsize - begins
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            self._map.madvise(mmap.MADV_WILLNEED, begin, length)

    def document_begins(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """Return a mask of the tokens that start a document, bool [n, count]. Each row is for the `count` tokens from
        one offset in `offsets` [n] on.

        The document starts come from the index, because shards written by other programs may have no separators.
        """
        starts = self._within_file(offsets, count)
        self._check_size()
        first, stop = np.split(self._documents_before(np.concatenate((starts, starts + count))), 2)
        counts = stop - first
        rows = np.repeat(np.arange(len(starts)), counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.zeros((len(starts), count), dtype=bool)
        begins[rows, self._document_starts(first[rows] + within) - starts[rows]] = True
        return begins

    def _check_size(self) -> None:
        """Raise `DataError` if a file was truncated after it was opened. Reading beyond the end of the file through the
        memory map would kill the process with SIGBUS. This check costs two system calls per batch.
        """
        for path, mapped in zip(shard_paths(self.prefix), (self._map, self._index_map), strict=True):
            if mapped is not None and (size := mapped.size()) < len(mapped):
                raise DataError(
                    f"{path}: the file was truncated from {len(mapped)} to {size} bytes while it was in use; copy "
                    "the shard again, then resume"
                )

    def _within_file(self, offsets: np.ndarray, count: int) -> np.ndarray:
        """Convert offsets in this part to offsets in the file. Raises `DataError` unless the part contains `count`
        tokens from each offset on.
        """
        outside = np.flatnonzero((offsets < 0) | (offsets + count > self.len_tokens))
        if outside.size:
            offset = int(offsets[outside[0]])
            raise DataError(
                f"{self.prefix}: tokens {offset} to {offset + count} are out of range; the shard has "
                f"{self.len_tokens} tokens"
            )
        return offsets + self._first_token

    def _document_offset(self, index: int) -> int:
        """Return the offset of a document in this part, or the end of the part if `index` == `documents`."""
        return int(self._document_starts(np.array([self._first_document + index]))[0]) - self._first_token

    def _document_starts(self, documents: np.ndarray) -> np.ndarray:
        """Return the offset in the file of each document's first token, int64 [n]. `documents` has the numbers of the
        documents in the file. For the number after the last document, the offset is the end of the file.
        """
        sequences = documents if self._one_sequence_each else self._boundaries[documents]
        last = len(self._starts) - 1
        starts = self._starts[np.minimum(sequences, last)] // self.dtype.itemsize
        return np.where(sequences > last, self._file_tokens, starts)

    def _documents_before(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many documents of the file begin before each token, int64 [n]. `tokens`, int64 [n], has the
        offsets of the tokens in the file.

        The bisection runs for all tokens together. np.searchsorted would copy the unaligned index in every call.
        """
        low = np.zeros(len(tokens), dtype=np.int64)
        high = np.full(len(tokens), self._file_documents, dtype=np.int64)
        for _ in range(self._file_documents.bit_length()):
            middle = (low + high) // 2
            before = (self._document_starts(middle) < tokens) & (low < high)
            low, high = np.where(before, middle + 1, low), np.where(before, high, middle)
        return low


def _token_map(path: Path, dtype: np.dtype) -> tuple[mmap.mmap | None, np.ndarray | RemoteTokens]:
    """Return (memory map, tokens) of a `.bin` file. The map is None for tokens on a store."""
    if remote_size(path) is not None:
        return None, RemoteTokens(path.with_name(path.name + NOTE), dtype)
    mapped = _mapped(path)
    return mapped, np.frombuffer(mapped, dtype=dtype)


def _mapped(path: Path) -> mmap.mmap:
    """Memory-map a non-empty file. The map keeps the file open and can report its current size."""
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


DIGEST_WINDOWS = 64
DIGEST_TOKENS = 4096


def sampled_digest(shard: Shard) -> str:
    """Return the SHA-256 of the tokens and document starts in `DIGEST_WINDOWS` windows that are spread evenly over a
    shard.

    At most 2 MB are read, so the digest distinguishes corpora but does not detect a change between the windows. The
    digest does not depend on the dtype, name or manifest.
    """
    count = min(DIGEST_TOKENS, shard.len_tokens)
    offsets = np.unique(np.linspace(0, shard.len_tokens - count, DIGEST_WINDOWS).astype(np.int64))
    digest = hashlib.sha256(f"{shard.documents} {shard.len_tokens}".encode())
    digest.update(shard.windows(offsets, count).astype("<i8").tobytes())
    digest.update(np.packbits(shard.document_begins(offsets, count)).tobytes())
    return digest.hexdigest()


LABELS_SUFFIX = "_label"
"""Suffix that turns the prefix of a shard into the prefix of its label shard."""
_LENGTH = np.dtype("<i4")


class ShardWriter:
    """Writes a shard document by document. The shard can be read after `finish`, and its bytes are the same as those
    that megatron-core's builder writes.

    Document lengths are kept in a temporary file, because a Python list of 10^8 lengths would take gigabytes.

    Args:
        prefix: path of the pair without `.bin` and `.idx`.
        vocab_size: vocabulary size, which determines the dtype of tokens; an id at or above it raises an error.
        labels: whether to write labels instead of tokens. Labels are int32 and may be `MASKED`.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, labels: bool = False) -> None:
        self._bin_path, self._idx_path = shard_paths(prefix)
        dtype = np.int32 if labels else token_dtype(vocab_size)
        self._vocab_size, self._dtype = vocab_size, np.dtype(dtype).newbyteorder("<")
        self._smallest = MASKED if labels else 0
        self.documents = self.tokens = 0
        self._bin = self._bin_path.open("wb")
        self._lengths = tempfile.TemporaryFile(dir=self._bin_path.parent)  # noqa: SIM115 - closed by close()

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document."""
        document = np.asarray(ids, dtype=np.int64)
        self.extend(document, np.array([document.size]))

    def extend(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents, given their concatenated tokens and the length of each document.

        Raises `DataError` for an id outside the vocabulary, because the dtype may be too small for the id.
        """
        if tokens.size and (int(tokens.min()) < self._smallest or int(tokens.max()) >= self._vocab_size):
            raise DataError(
                f"{self._bin_path}: a token id is outside the vocabulary of {self._vocab_size} ids; prepare with the "
                "tokenizer that encoded the text"
            )
        self._bin.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.write(np.ascontiguousarray(lengths, dtype=_LENGTH).data)
        self.documents += len(lengths)
        self.tokens += tokens.size

    def finish(self) -> None:
        """Write the index and close the files."""
        with self._idx_path.open("wb") as index:
            index.write(HEADER.pack(MAGIC, 1, dtype_code(self._dtype), self.documents, self.documents + 1))
            for lengths in self._stored_lengths():
                index.write(lengths.data)
            end = 0
            for lengths in self._stored_lengths():
                ends = end + np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize
                index.write((ends - lengths.astype("<i8") * self._dtype.itemsize).data)
                end = int(ends[-1])
            for begin in range(0, self.documents + 1, _BLOCK):
                index.write(np.arange(begin, min(begin + _BLOCK, self.documents + 1), dtype="<i8").data)
        self.close()

    def close(self) -> None:
        """Close the files without writing an index."""
        self._bin.close()
        self._lengths.close()

    def _stored_lengths(self) -> Iterator[np.ndarray]:
        self._lengths.seek(0)
        while raw := self._lengths.read(_BLOCK * _LENGTH.itemsize):
            yield np.frombuffer(raw, dtype=_LENGTH)
