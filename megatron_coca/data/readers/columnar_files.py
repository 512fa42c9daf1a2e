"""Read the required columns of parquet and Arrow files as record batches that can be sent to a worker process.

pyarrow takes long to import, so it is imported inside the functions that need it.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import Chunk, RawRecord, ReadingProblems
from megatron_coca.data.readers.streams import TooLong

ChooseColumns = Callable[[list[str]], list[str]]
"""A function that selects the required columns, given the column names of a table."""
Batches = Iterator[tuple[Any, int]]
"""An iterator over (`pyarrow.RecordBatch`, bytes of the file read so far)."""

_READ_AHEAD = 1 << 20  # bytes per column; without a buffer size, pyarrow loads the whole column of a row group
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_batches(path: Path, choose: ChooseColumns, size: int) -> Batches:
    """Read a parquet file in batches of about `size` bytes, regardless of the size of its row groups. Raises
    `DataError` if the file is damaged.
    """
    from pyarrow import parquet

    # Verify the checksums if the file has any. Without this check, zeroed pages would be read as rows of empty text.
    options = {"buffer_size": _READ_AHEAD, "pre_buffer": False, "page_checksum_verification": True}
    with _damage(path), parquet.ParquetFile(path, **options) as file:
        metadata, columns, length = file.metadata, choose(file.schema_arrow.names), path.stat().st_size
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        parts = [group.column(index) for group in groups for index in range(group.num_columns)]
        names = {name: {name, name.split(".")[0]} for name in {part.path_in_schema for part in parts}}
        wanted = [part for part in parts if names[part.path_in_schema].intersection(columns)]
        uncompressed = sum(part.total_uncompressed_size for part in wanted)
        per_batch = max(1, size * metadata.num_rows // max(1, uncompressed))
        rows = 0
        for batch in file.iter_batches(min(per_batch, 1 << 16), columns=columns, use_threads=False):
            rows += batch.num_rows
            yield batch, length * rows // metadata.num_rows


def arrow_batches(path: Path, choose: ChooseColumns, size: int) -> Batches:
    """Read the record batches of an Arrow file or stream, such as the files of `datasets`. Raises `DataError` if the
    file is damaged.
    """
    import pyarrow as arrow

    # The file is not memory-mapped, because mapped pages count as memory of this process.
    with _damage(path), arrow.OSFile(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if is_file:
            file = arrow.ipc.open_file(source)
            batches = map(file.get_batch, range(file.num_record_batches))
        else:
            batches = arrow.ipc.open_stream(source)
        for batch in batches:
            yield batch.select(choose(batch.schema.names)), source.tell()
        if not is_file:
            with path.open("rb") as stream:  # pyarrow does not detect a stream that was cut off between two batches
                stream.seek(-len(_STREAM_END), 2)
                if stream.read() != _STREAM_END:
                    raise DataError(
                        f"{path}: cannot be read to its end (the end-of-stream mark is missing); check that the file "
                        "is complete"
                    )


TABLE_FORMATS: dict[str, Callable[[Path, ChooseColumns, int], Batches]] = {
    ".parquet": parquet_batches,
    ".arrow": arrow_batches,
}


def packed(batch: Any, size: int, limit: int) -> Iterator[tuple[int, bytes | TooLong]]:
    """Cut a batch into pieces of about `size` bytes. Yields (number of rows, bytes for `table_rows`).

    A row of more than `limit` bytes is yielded as `TooLong`, without its content.
    """
    import pyarrow as arrow

    lengths = sum((_lengths(column) for column in batch.columns), np.zeros(batch.num_rows, dtype=np.int64))
    ends, start = np.cumsum(lengths), 0
    while start < batch.num_rows:
        if lengths[start] > limit:
            yield 1, TooLong(int(lengths[start]))
            start += 1
            continue
        before = ends[start] - lengths[start]
        stop = max(start + 1, int(np.searchsorted(ends, before + size, side="right")))
        longer = np.flatnonzero(lengths[start:stop] > limit)
        stop = start + int(longer[0]) if longer.size else stop
        # The slice is serialized, because a pickled slice would include the whole batch.
        piece = _without_shared_values(batch.slice(start, stop - start))
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, piece.schema) as writer:
            writer.write_batch(piece)
        yield stop - start, sink.getvalue().to_pybytes()
        start = stop


def _lengths(column: Any) -> np.ndarray:
    """Return the number of bytes of each value in a column, int64 [rows]. A text that several rows share counts in each
    of them. If the type of the column contains no text, the result is the average size for every value.
    """
    from pyarrow import BaseExtensionType, compute, types

    kind = column.type
    if isinstance(kind, BaseExtensionType):
        return _lengths(column.storage)
    if types.is_dictionary(kind):
        indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        of_values = _lengths(column.dictionary)
        return of_values[indices] if len(of_values) else np.zeros(len(column), dtype=np.int64)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return compute.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    if str(kind) in _VIEWS and column.buffers()[1] is not None:
        views = np.frombuffer(column.buffers()[1], dtype=np.int32).reshape(-1, 4)  # a view begins with its length
        return views[column.offset : column.offset + len(column), 0] * column.is_valid().to_numpy(zero_copy_only=False)
    if types.is_struct(kind):
        return sum(map(_lengths, column.flatten()), np.zeros(len(column), dtype=np.int64))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        inner = column.cast(_as_list(kind)) if types.is_map(kind) else column
        ends = np.concatenate([[0], np.cumsum(_lengths(inner.values))])
        return np.diff(ends[inner.offsets.to_numpy(zero_copy_only=False)])
    return np.full(len(column), column.nbytes // max(1, len(column)), dtype=np.int64)


_VIEWS = {"string_view": "large_string", "binary_view": "large_binary"}
"""Maps each type with values in shared buffers to the type that holds the same values in a buffer of its own."""


def _as_list(kind: Any) -> Any:
    import pyarrow as arrow

    pair = [arrow.field("key", kind.key_type), arrow.field("value", kind.item_type)]
    return arrow.list_(arrow.struct(pair))


def _without_shared_values(batch: Any) -> Any:
    """Return a slice of a batch with its own copy of the values in dictionaries and views. Serialization would
    otherwise include the values of the whole batch in every slice.
    """
    import pyarrow as arrow

    schema = arrow.schema([field.with_type(_own_type(field.type)) for field in batch.schema])
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, schema=schema)


def _own_type(kind: Any) -> Any:
    """Return a type without dictionaries and views that represents the same values."""
    import pyarrow as arrow

    if arrow.types.is_dictionary(kind):
        return _own_type(kind.value_type)
    if str(kind) in _VIEWS:
        return getattr(arrow, _VIEWS[str(kind)])()
    if arrow.types.is_struct(kind):
        return arrow.struct([field.with_type(_own_type(field.type)) for field in kind])
    if arrow.types.is_list(kind) or arrow.types.is_large_list(kind):
        made = arrow.list_ if arrow.types.is_list(kind) else arrow.large_list
        return made(kind.value_field.with_type(_own_type(kind.value_type)))
    return kind


def table_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[RawRecord]:
    """Yield the rows of a packed batch as records. They equal the records of a file of JSON lines with the same data.
    Rows are numbered from `chunk.first`.
    """
    from pyarrow import ipc

    batch = ipc.open_stream(chunk.payload).read_next_batch()
    converters = [_converter(field) for field in batch.schema]
    size = len(chunk.payload) // max(1, batch.num_rows)
    for index in range(batch.num_rows):
        place = f"{chunk.path}:{chunk.first + index}"
        try:
            values = (column[index].as_py() for column in batch.columns)
            row = {
                name: value if convert is None or value is None else convert(value)
                for name, value, convert in zip(batch.schema.names, values, converters, strict=True)
            }
        except UnicodeDecodeError as error:
            problems.add(place, "invalid UTF-8", f"byte {error.start}", size)
        except (ValueError, RecursionError) as error:  # raised for a column of JSON
            problems.add(place, "invalid JSON", str(error), size)
        else:
            yield RawRecord(place, row, size)


def _converter(field: Any, in_list: bool = False) -> Callable[[Any], Any] | None:
    """Return the function that converts a non-null value of pyarrow to the value that JSON lines would have. Return
    None if no conversion is needed.

    Columns with the extension type `arrow.json`, which `datasets` writes for `Json`, are parsed. Maps become objects.
    All objects in a list share the keys of one struct. A null in such an object stands for an absent key, so the key is
    removed.
    """
    from pyarrow import types

    kind, metadata = field.type, field.metadata or {}
    if "arrow.json" in (getattr(kind, "extension_name", ""), metadata.get(b"ARROW:extension:name", b"").decode()):
        return json.loads
    if types.is_struct(kind):
        inner = {each.name: _converter(each, in_list) for each in kind}
        if not in_list and not any(inner.values()):
            return None
        return lambda value: {
            name: item if item is None or inner[name] is None else inner[name](item)  # type: ignore[misc]
            for name, item in value.items()
            if item is not None or not in_list
        }
    if types.is_map(kind):
        of_item = _converter(kind.item_field, True) or _same
        return lambda value: {key: None if item is None else of_item(item) for key, item in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        convert = _converter(kind.value_field, True)
        return convert and (lambda value: [None if item is None else convert(item) for item in value])
    return None


def _same(value: Any) -> Any:
    return value


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    import pyarrow as arrow

    try:
        yield
    except MemoryError:
        raise  # pyarrow's memory errors are also ArrowExceptions, but they do not mean that the file is damaged
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read to its end ({error}); check that the file is complete and readable"
        ) from error
