"""Tokenized documents on disk: the ``.bin``/``.idx`` pairs of Megatron and GPT-NeoX, through megatron-core.

The index says how long each document is and where it begins; the other file is nothing but tokens, so that any slice of
the concatenated documents is one read from a memory map. This is the one module that imports megatron-core, and only
when a shard is first opened or written: the import takes seconds.
"""

import copy
import functools
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from megatron_coca.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
_INTEGER_CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_CHECKED_AT_ONCE = 1 << 20
_REBUILD = "Prepare the corpus again, or copy both files again from where they were built."


@functools.cache
def _indexed_dataset() -> ModuleType:
    with warnings.catch_warnings():
        # Its optimizers, which the import pulls in, say that they miss Apex and Transformer Engine: not used here.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*", category=UserWarning)
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def _paths(prefix: str | Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> type[np.integer]:
    """uint16 for fewer than 65,500 ids, else int32: GPT-NeoX's rule."""
    return np.uint16 if vocab_size < 65500 else np.int32


class ShardWriter:
    """Writes one ``.bin``/``.idx`` pair, document by document. Nothing is complete before ``finish``."""

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self._bin, self._idx = _paths(prefix)
        self._vocab_size = vocab_size
        self._builder = _indexed_dataset().IndexedDatasetBuilder(str(self._bin), dtype=token_dtype(vocab_size))
        self.documents = self.tokens = 0

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. ``DataError`` for an id outside the vocabulary, which the dtype could not hold."""
        document = np.asarray(ids, dtype=np.int64)
        if document.size and (document.min() < 0 or document.max() >= self._vocab_size):
            raise DataError(f"{self._bin}: a token id lies outside the vocabulary of {self._vocab_size}.")
        self._builder.add_document(document, [document.size])
        self.documents += 1
        self.tokens += document.size

    def finish(self) -> None:
        """Write the index and close both files."""
        self._builder.finalize(str(self._idx))

    def close(self) -> None:
        """Close without an index, after an error."""
        self._builder.data_file.close()


class Shard:
    """A ``.bin``/``.idx`` pair, opened for reading and checked.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, truncated, of another format, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._check_header()
        self._dataset: Any = _indexed_dataset().IndexedDataset(str(prefix))
        self.dtype = np.dtype(self._dataset.index.dtype)
        self._check_index()
        self._boundaries: np.ndarray = self._dataset.document_indices
        self._starts: np.ndarray = self._dataset.index.sequence_pointers
        self.len_tokens = _paths(prefix)[0].stat().st_size // self.dtype.itemsize
        self.documents = len(self._boundaries) - 1
        self._first_document = self._first_token = 0

    def part(self, first: int, last: int) -> Self:
        """The documents from ``first`` up to but not ``last`` as a shard of their own, on the same memory map."""
        if not 0 <= first < last <= self.documents:
            raise DataError(f"{self.prefix}: documents {first} to {last} are not a part of its {self.documents}.")
        view = copy.copy(self)
        view._first_document = self._first_document + first
        view._first_token = self._document_offset(first) + self._first_token
        view.documents = last - first
        view.len_tokens = self._document_offset(last) - self._document_offset(first)
        return view

    def __repr__(self) -> str:
        return f"Shard({str(self.prefix)!r}: {self.documents} documents, {self.len_tokens} tokens)"

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int64 [length], with the id that ends it where the shard was prepared with one."""
        if not 0 <= index < self.documents:
            raise DataError(f"{self.prefix}: no document {index}; the shard has {self.documents}.")
        begin, end = self._document_offset(index), self._document_offset(index + 1)
        return self.tokens(begin, end - begin)

    def tokens(self, offset: int, count: int) -> np.ndarray:
        """``count`` tokens from ``offset`` on, across documents: int64 [count], a copy."""
        if offset < 0 or count < 0 or offset + count > self.len_tokens:
            raise DataError(
                f"{self.prefix}: tokens {offset} to {offset + count} lie outside its {self.len_tokens} tokens."
            )
        start = (self._first_token + offset) * self.dtype.itemsize
        raw = self._dataset.bin_reader.read(dtype=self.dtype, count=count, offset=start)
        return raw.astype(np.int64)

    def _document_offset(self, index: int) -> int:
        """The shard's own number of the first token of a document, or of the end for ``index`` == ``documents``."""
        sequence = int(self._boundaries[self._first_document + index])
        ends_file = sequence == len(self._starts)
        byte = _paths(self.prefix)[0].stat().st_size if ends_file else int(self._starts[sequence])
        return byte // self.dtype.itemsize - self._first_token

    def _check_header(self) -> None:
        bin_path, idx_path = _paths(self.prefix)
        for path in (bin_path, idx_path):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file. A shard is a .bin and an .idx file; give their path without the ending, "
                    "and prepare the corpus first (python tools/prepare_data.py --help)."
                )
        with idx_path.open("rb") as stream:
            header = stream.read(_HEADER.size)
        if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
            raise DataError(f"{idx_path}: not an MMIDIDX index, the format of Megatron and GPT-NeoX (data_impl mmap).")
        if len(header) < _HEADER.size:
            raise DataError(f"{idx_path}: truncated within its header. {_REBUILD}")
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1 or code not in _INTEGER_CODES:
            raise DataError(f"{idx_path}: version {version} with dtype code {code} is not one that holds tokens.")
        expected, actual = _HEADER.size + 12 * sequences + 8 * entries, idx_path.stat().st_size
        if expected != actual:
            raise DataError(f"{idx_path}: truncated or foreign, {actual} bytes where {expected} are due. {_REBUILD}")
        if not sequences or entries < 2 or not bin_path.stat().st_size:
            raise DataError(f"{self.prefix}: the shard holds no token. {_REBUILD}")

    def _check_index(self) -> None:
        bin_path, idx_path = _paths(self.prefix)
        index, size = self._dataset.index, self.dtype.itemsize
        boundaries = index.document_indices
        end = 0
        for begin in range(0, len(index), _CHECKED_AT_ONCE):
            lengths = index.sequence_lengths[begin : begin + _CHECKED_AT_ONCE].astype(np.int64)
            ends = end + np.cumsum(lengths) * size
            pointers = index.sequence_pointers[begin : begin + len(lengths)]
            if (lengths < 0).any() or (pointers != ends - lengths * size).any():
                raise DataError(f"{idx_path}: the documents do not follow one another without gaps. {_REBUILD}")
            end = int(ends[-1])
        if end != bin_path.stat().st_size:
            raise DataError(f"{bin_path}: {bin_path.stat().st_size} bytes where its index tells of {end}. {_REBUILD}")
        if boundaries[0] != 0 or boundaries[-1] != len(index) or (np.diff(boundaries) < 0).any():
            raise DataError(f"{idx_path}: the document index is out of order. {_REBUILD}")
