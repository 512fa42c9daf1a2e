"""Read the required columns of parquet and Arrow files as record batches that can be sent to a worker process.

pyarrow takes long to import, so it is imported inside the functions that need it.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import Chunk, ReadingProblems, Row
from megatron_coca.data.readers.streams import TooLong

Choose = Callable[[list[str]], list[str]]
"""A function that selects the required columns, given the column names of a table."""
Batches = Iterator[tuple[Any, int]]
"""An iterator over (`pyarrow.RecordBatch`, bytes of the file read so far)."""

_READ_AHEAD = 1 << 20  # bytes per column; without a buffer size, pyarrow loads the whole column of a row group
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def parquet_batches(path: Path, choose: Choose, size: int) -> Batches:
    """Read a parquet file in batches of about `size` bytes, regardless of the size of its row groups. Raises
    `DataError` if the file is damaged.
    """
    from pyarrow import parquet

    # Verify the checksums if the file has any. Otherwise zeroed pages would be read as rows of empty text.
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


def arrow_batches(path: Path, choose: Choose, size: int) -> Batches:
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


TABLE_FORMATS: dict[str, Callable[[Path, Choose, int], Batches]] = {
    ".parquet": parquet_batches,
    ".arrow": arrow_batches,
}


def packed(batch: Any, size: int, limit: int) -> Iterator[tuple[int, bytes | TooLong]]:
    """Cut a batch into pieces of about `size` bytes. Yields (number of rows, bytes for `table_rows`).

    A row of more than `limit` bytes is yielded as `TooLong`, without its content.
    """
    import pyarrow as arrow

    # Bytes of each row: exact for text columns, averaged for other columns.
    lengths = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        texts = _text_lengths(column)
        lengths += column.nbytes // max(1, len(column)) if texts is None else texts
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
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch.slice(start, stop - start))
        yield stop - start, sink.getvalue().to_pybytes()
        start = stop


def _text_lengths(column: Any) -> np.ndarray | None:
    """Return the number of bytes of each text in a column, int64 [rows], or None for a column of another type."""
    from pyarrow import compute, types

    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = compute.binary_length(column)
        return lengths.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return None


def table_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    """Yield ("path:number", row) for the rows of a packed batch. Rows are numbered from `chunk.first`."""
    from pyarrow import ipc

    batch = ipc.open_stream(chunk.payload).read_next_batch()
    for index in range(batch.num_rows):
        place = f"{chunk.path}:{chunk.first + index}"
        try:
            row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        except UnicodeDecodeError as error:
            problems.add(place, "invalid UTF-8", f"byte {error.start}")
        else:
            yield place, row


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
