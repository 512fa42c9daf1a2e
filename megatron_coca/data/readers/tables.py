"""Tables on disk, parquet and Arrow: the needed columns, as record batches that a worker can be sent."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import Chunk, ReadingProblems, Row
from megatron_coca.data.readers.streams import TooLong

Choose = Callable[[list[str]], list[str]]
"""Of a table's columns the needed ones."""
Batches = Iterator[tuple[Any, int]]
"""(``pyarrow.RecordBatch``, bytes of the file read so far)."""

_READ_AHEAD = 1 << 20  # bytes a column; without it parquet loads the whole column of a row group
_DICTIONARY_BATCHES = 8  # at once where texts come in dictionaries: each batch gets a copy of the dictionary
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_batches(path: Path, choose: Choose, size: int) -> Batches:
    """The rows of a parquet file, about ``size`` bytes at a time whatever its row groups. ``DataError`` for damage."""
    parquet = _pyarrow("pyarrow.parquet")
    # Checksums are verified where the writer left some: zeroed pages are otherwise rows of empty text.
    options = {"buffer_size": _READ_AHEAD, "pre_buffer": False, "page_checksum_verification": True}
    with _damage(path), parquet.ParquetFile(path, **options) as file:
        columns, rows, length = choose(file.schema_arrow.names), 0, path.stat().st_size
        per_batch = max(1, size * file.metadata.num_rows // max(1, _column_bytes(file.metadata, columns)))
    # A text that is stored once for many rows stays one text until ``packed`` has cut the rows.
    options["read_dictionary"] = _dictionary_columns(file.metadata, columns)
    per_batch *= _DICTIONARY_BATCHES if options["read_dictionary"] else 1
    with _damage(path), parquet.ParquetFile(path, **options) as file:
        for batch in file.iter_batches(min(per_batch, 1 << 16), columns=columns, use_threads=False):
            rows += batch.num_rows
            yield batch, length * rows // file.metadata.num_rows


def arrow_batches(path: Path, choose: Choose, size: int) -> Batches:
    """The record batches of an Arrow file, also as ``datasets`` saves them. ``DataError`` for damage."""
    arrow = _pyarrow("pyarrow")
    # Read rather than mapped: pages of a mapped file count as memory of this process.
    with _damage(path), arrow.OSFile(str(path)) as source:
        magic = source.read(len(_FILE_MAGIC))
        source.seek(0)
        for batch in (_of_file if magic == _FILE_MAGIC else _of_stream)(path, arrow, source):
            yield batch.select(choose(batch.schema.names)), source.tell()


TABLE_FORMATS: dict[str, Callable[[Path, Choose, int], Batches]] = {
    ".parquet": parquet_batches,
    ".arrow": arrow_batches,
}


def packed(batch: Any, size: int, limit: int) -> Iterator[tuple[int, bytes | TooLong]]:
    """(rows, bytes) of a batch, cut into parts of about ``size`` bytes; ``table_rows`` reads them. A row of more than
    ``limit`` bytes is given as its length alone.
    """
    lengths = _row_lengths(batch)
    ends, start = np.cumsum(lengths), 0
    while start < batch.num_rows:
        if lengths[start] > limit:
            yield 1, TooLong(int(lengths[start]), 1)
            start += 1
            continue
        before = ends[start] - lengths[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + size, side="right")))
        longer = np.flatnonzero(lengths[start:stop] > limit)
        stop = start + int(longer[0]) if longer.size else stop
        yield stop - start, _serialized(batch.slice(start, stop - start))
        start = stop


def _serialized(part: Any) -> bytes:
    """Rows of a batch by themselves: a slice that is pickled takes the whole batch with it, and its dictionaries."""
    arrow = _pyarrow("pyarrow")
    columns = [_plain(column) for column in part.columns]
    part = arrow.record_batch(columns, names=part.schema.names)
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, part.schema) as writer:
        writer.write_batch(part)
    return sink.getvalue().to_pybytes()


def _plain(column: Any) -> Any:
    types = _pyarrow("pyarrow").types
    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _row_lengths(batch: Any) -> np.ndarray:
    """Bytes of each row, int64 [rows]: those of texts exactly, other columns in equal parts."""
    total = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        lengths = _text_lengths(column)
        total += column.nbytes // max(1, len(column)) if lengths is None else lengths
    return total


def _text_lengths(column: Any) -> np.ndarray | None:
    """Bytes of each text of a column, int64 [rows]; None for a column of something else."""
    arrow, compute = _pyarrow("pyarrow"), _pyarrow("pyarrow.compute")
    types, kind = arrow.types, column.type
    if types.is_dictionary(kind):
        lengths = _text_lengths(column.dictionary)
        rows = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return None if lengths is None else lengths[rows] if len(lengths) else np.zeros(len(column), dtype=np.int64)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(column.buffers()[1], dtype="<i4").reshape(-1, 4)  # the first of four words is the length
        return views[column.offset : column.offset + len(column), 0].astype(np.int64)
    if any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        return compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return None


def table_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    """(place, row) of a packed batch, whose first row is number ``chunk.first``; a place is "path:number"."""
    table = _pyarrow("pyarrow").ipc.open_stream(chunk.payload).read_all()
    names = table.schema.names
    try:
        rows: Iterator[Any] = zip(*(column.to_pylist() for column in table.columns), strict=True)
        for number, values in enumerate(rows, chunk.first):
            yield f"{chunk.path}:{number}", dict(zip(names, values, strict=True))
    except UnicodeDecodeError:  # before the first row: the columns are decoded whole
        yield from _rows_one_by_one(table, chunk, problems)


def _rows_one_by_one(table: Any, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    for index in range(table.num_rows):
        place = f"{chunk.path}:{chunk.first + index}"
        try:
            row = {name: table.column(name)[index].as_py() for name in table.schema.names}
        except UnicodeDecodeError as error:
            problems.add(place, "invalid UTF-8", f"byte {error.start}")
        else:
            yield place, row


def _dictionary_columns(metadata: Any, columns: list[str]) -> list[str]:
    """Those of the columns of texts of which some row group stores a text once for many rows."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    parts = [group.column(index) for group in groups for index in range(group.num_columns)]
    found = {p.path_in_schema for p in parts if p.physical_type == "BYTE_ARRAY" and p.has_dictionary_page}
    return [name for name in columns if name in found]


def _of_file(path: Path, arrow: Any, source: Any) -> Iterator[Any]:
    reader = arrow.ipc.open_file(source)
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _of_stream(path: Path, arrow: Any, source: Any) -> Iterator[Any]:
    yield from arrow.ipc.open_stream(source)
    with path.open("rb") as file:  # the library takes an end between two batches for the end
        if _tail(file, len(_STREAM_END)) != _STREAM_END:
            raise DataError(f"{path}: cannot be read to its end (the mark at the end is missing). Is it complete?")


def _tail(file: IO[bytes], length: int) -> bytes:
    file.seek(-length, 2)
    return file.read()


def _column_bytes(metadata: Any, columns: list[str]) -> int:
    """Uncompressed bytes of the columns."""
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    parts = (group.column(index) for group in groups for index in range(group.num_columns))
    wanted = set(columns)
    return sum(p.total_uncompressed_size for p in parts if wanted & {p.path_in_schema, p.path_in_schema.split(".")[0]})


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    arrow = _pyarrow("pyarrow")
    try:
        yield
    except MemoryError:
        raise  # it says nothing about the file
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read to its end ({error}). Is the file complete, and readable?") from error


def _pyarrow(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError("Reading .parquet and .arrow needs the pyarrow package: pip install pyarrow") from error
