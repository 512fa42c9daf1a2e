"""Cut byte streams between records, and parse JSON lines and text."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import IO, NamedTuple

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.source import Chunk, RawRecord, ReadingProblems, RejectedRecord

BLOCK = 1 << 20  # bytes; a chunk contains about one block, unless the stream is shorter
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TooLong(NamedTuple):
    """A placeholder for a record that is longer than the limit. `length` is in bytes and includes the line ending."""

    length: int


def raw_blocks(place: str, raw: IO[bytes], size: int) -> Iterator[bytes]:
    """Read an open file in blocks of `size` bytes. Raises `DataError` if reading fails."""
    while True:
        try:
            block = raw.read(size)
        except OSError as error:
            raise DataError(f"{place}: cannot be read to its end ({error}); check the disk and the file") from error
        if not block:
            return
        yield block


def pieces(blocks: Iterable[bytes], lines: bool, size: int, limit: int) -> Iterator[bytes | TooLong]:
    """Yield whole records, about `size` bytes at a time. A record longer than `size` is buffered until its end.

    With `lines`, each line is a record, including a last line without a line ending; otherwise the whole stream is one
    record. A record of more than `limit` bytes is yielded as `TooLong`, and at most about `limit + size` of its bytes
    are in memory.
    """
    buffer, searched, dropped = bytearray(), 0, 0
    for block in blocks:
        buffer += block
        if len(buffer) < size:
            continue
        if lines and (end := buffer.rfind(b"\n", searched) + 1):
            yield from _within(limit, _head(buffer, end), lines, dropped)
            del buffer[:end]
            dropped = 0
        elif dropped or len(buffer) > limit:
            dropped += len(buffer)
            buffer.clear()
        searched = len(buffer)
    if buffer or dropped or not lines:
        yield from _within(limit, bytes(buffer), lines, dropped)


def _within(limit: int, records: bytes, lines: bool, dropped: int) -> Iterator[bytes | TooLong]:
    """Yield `records`, with a `TooLong` in place of each record above `limit` bytes. `dropped` bytes of the first
    record were already removed.
    """
    if not dropped and len(records) <= limit:
        yield records
        return
    pending = start = 0  # start of the records that are not yielded yet, and start of the current record
    while start < len(records) or dropped:
        end = (records.find(b"\n", start) + 1 if lines else 0) or len(records)
        if (length := dropped + end - start) > limit:
            if start > pending:
                yield records[pending:start]
            yield TooLong(length)
            pending = end
        start, dropped = end, 0
    if pending < len(records):
        yield records[pending:]


def _head(buffer: bytearray, end: int) -> bytes:
    with memoryview(buffer) as view:  # slicing the buffer itself would copy the bytes twice
        return bytes(view[:end])


class StreamFormat(NamedTuple):
    """A format in which records follow one another.

    Attributes:
        lines: whether each line is a record, so that a file can be cut between lines. Otherwise the whole file is one
            record.
        rows: a function that yields the records in a chunk's payload (bytes), numbered from `chunk.first`. It adds
            invalid records to the problems.
    """

    lines: bool
    rows: Callable[[Chunk, ReadingProblems], Iterator[RawRecord]]


def _json_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[RawRecord]:
    for number, line in _lines(chunk):
        place = f"{chunk.path}:{number}"
        try:
            if number == 1:
                start = line.strip()
                if start in (b"[", b"{") or (start[:1] == b"[" and start[1:].lstrip()[:1] == b"{"):
                    hint = "the file seems to be a single JSON value; write one object per line, as jq -c '.[]' does"
                    raise RejectedRecord("not JSON lines", hint)
            record = json.loads(decode(_without_zeros(line)))
            if not isinstance(record, dict):
                raise RejectedRecord("not a JSON object", type(record).__name__)
            yield RawRecord(place, record, len(line))
        except (ValueError, RecursionError) as error:  # ValueError is also raised for a number with too many digits
            problems.add(place, "invalid JSON", str(error), len(line))
        except RejectedRecord as rejected:
            problems.add(place, rejected.kind, rejected.detail, len(line))


JSON_LINES = StreamFormat(True, _json_rows)
"""One JSON object per line; blank lines are skipped."""


def _file_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[RawRecord]:
    return _text_rows([(chunk.path, chunk.payload.removeprefix(BYTE_ORDER_MARK))], problems)


def _line_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[RawRecord]:
    lines = ((f"{chunk.path}:{number}", line.removesuffix(b"\r")) for number, line in _lines(chunk))
    return _text_rows(lines, problems)


def _text_rows(records: Iterable[tuple[str, bytes]], problems: ReadingProblems) -> Iterator[RawRecord]:
    for place, raw in records:
        try:
            row = {"text": decode(_without_zeros(raw))}
        except RejectedRecord as rejected:
            problems.add(place, rejected.kind, rejected.detail, len(raw))
        else:
            yield RawRecord(place, row, len(raw))


TEXT_FORMATS: dict[str, StreamFormat] = {
    "file": StreamFormat(False, _file_rows),
    "line": StreamFormat(True, _line_rows),
}
"""Maps each value of `SourceSpec.documents` to its format of text files. With `file`, a document is the whole file.
With `line`, it is a line without its line ending. Blank documents are skipped.
"""


BINARY = "binary data"
"""A kind of fault: zero bytes, as in UTF-16 without a byte order mark. Such data can be valid UTF-8."""


def decode(raw: bytes) -> str:
    """Decode UTF-8. Raises `RejectedRecord` if `raw` is not valid UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _without_zeros(raw: bytes) -> bytes:
    """Return `raw`. Raises `RejectedRecord` if it contains a zero byte. Valid JSON contains zero only as an escape."""
    if (place := raw.find(b"\0")) >= 0:
        raise RejectedRecord(BINARY, f"byte {place} is zero")
    return raw


def _without_mark(chunk: Chunk) -> bytes:
    return chunk.payload.removeprefix(BYTE_ORDER_MARK) if chunk.first == 1 else chunk.payload


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for the lines that are not blank."""
    for number, line in enumerate(_without_mark(chunk).split(b"\n"), chunk.first):
        if line and not line.isspace():
            yield number, line
