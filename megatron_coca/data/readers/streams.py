"""Cut byte streams between records, and parse JSON lines and text."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import IO, NamedTuple

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.readers.source import Chunk, ReadingProblems, RejectedRecord, Row

BLOCK = 1 << 20  # bytes; a chunk has about one block, unless the stream is shorter
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Cut(NamedTuple):
    """Positions at which a stream may be cut.

    Attributes:
        ends: delimiters that end a record; none if the whole stream is one record.
        counted: occurrences of this number the records. They must not overlap, so that counts of pieces add up.
    """

    ends: tuple[bytes, ...]
    counted: bytes


class TooLong(NamedTuple):
    """Replaces a record that is longer than the limit.

    Attributes:
        length: bytes of the record, with its delimiter.
        counted: occurrences of ``Cut.counted`` in it.
    """

    length: int
    counted: int


def raw_blocks(place: str, raw: IO[bytes], size: int) -> Iterator[bytes]:
    """Read an open file in blocks of ``size`` bytes; ``DataError`` if reading fails."""
    while True:
        try:
            block = raw.read(size)
        except OSError as error:
            raise DataError(f"{place}: cannot be read to its end ({error}). Check the disk and the file.") from error
        if not block:
            return
        yield block


def pieces(place: str, blocks: Iterable[bytes], cut: Cut, size: int, limit: int) -> Iterator[bytes | TooLong]:
    """Yield whole records, about ``size`` bytes of them at a time; a longer record is buffered until it ends.

    Bytes after the last delimiter are a record too, unless the stream is damaged there: then the complete records come
    first and the ``DataError`` of ``blocks`` after them. For a record of more than ``limit`` bytes only its length is
    given, and at most about ``limit + size`` bytes of it are in memory.
    """
    buffer, searched, dropped = bytearray(), 0, TooLong(0, 0)
    try:
        for block in blocks:
            buffer += block
            if len(buffer) < size:
                continue
            if end := _last_end(buffer, cut.ends, searched):
                yield from _within(limit, _head(buffer, end), cut, dropped)
                del buffer[:end]
                dropped = TooLong(0, 0)
            elif dropped.length or len(buffer) > limit:
                # No record ends in the buffer: drop all but what may be the beginning of a delimiter.
                end = max(0, len(buffer) + 1 - max(map(len, cut.ends), default=1))
                counted = buffer.count(cut.counted, 0, end) if cut.counted else 0
                dropped = TooLong(dropped.length + end, dropped.counted + counted)
                del buffer[:end]
            searched = len(buffer)
    except DataError:
        if end := _last_end(buffer, cut.ends, searched):
            yield from _within(limit, _head(buffer, end), cut, dropped)
        raise
    if buffer or dropped.length or not cut.ends:
        yield from _within(limit, bytes(buffer), cut, dropped)


def _within(limit: int, records: bytes, cut: Cut, dropped: TooLong) -> Iterator[bytes | TooLong]:
    """``records`` with those over ``limit`` replaced; ``dropped`` was already removed from the first."""
    if not dropped.length and len(records) <= limit:
        yield records
        return
    pending, start = 0, 0  # start of the records that are not yielded yet, and of the present one
    for end in _ends(records, cut):
        length = dropped.length + end - start
        if length > limit:
            if start > pending:
                yield records[pending:start]
            yield TooLong(length, dropped.counted + records.count(cut.counted, start, end))
            pending, dropped = end, TooLong(0, 0)
        start = end
    if pending < len(records):
        yield records[pending:]


def _ends(records: bytes, cut: Cut) -> Iterator[int]:
    """The end of each record."""
    end = 0
    for delimiter in re.finditer(b"|".join(map(re.escape, cut.ends)), records) if cut.ends else ():
        end = delimiter.end()
        yield end
    if end < len(records) or not end:
        yield len(records)


def _last_end(buffer: bytearray, ends: tuple[bytes, ...], searched: int) -> int:
    """End of the last delimiter in ``buffer``, or 0; its first ``searched`` bytes are known to hold none."""
    starts = ((buffer.rfind(end, max(0, searched - len(end) + 1)), end) for end in ends)
    return max((start + len(end) for start, end in starts if start >= 0), default=0)


def _head(buffer: bytearray, end: int) -> bytes:
    with memoryview(buffer) as view:  # a slice of the buffer itself would be copied twice
        return bytes(view[:end])


class StreamFormat(NamedTuple):
    """A format of records one after another, so that a file can be cut between any two of them.

    Attributes:
        cut: where.
        rows: gives ("path:number", record) of the records in a chunk's payload (bytes), numbered from ``chunk.first``.
            Invalid records go to the problems.
    """

    cut: Cut
    rows: Callable[[Chunk, ReadingProblems], Iterator[tuple[str, Row]]]


def _json_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    for number, line in _lines(chunk):
        place = f"{chunk.path}:{number}"
        try:
            if number == 1:
                start = line.strip()
                if start in (b"[", b"{") or (start[:1] == b"[" and start[1:].lstrip()[:1] == b"{"):
                    hint = "it seems to be one JSON value; write one object per line, as jq -c '.[]' does"
                    raise RejectedRecord("not JSON lines", hint)
            record = json.loads(decode(line))
            if not isinstance(record, dict):
                raise RejectedRecord("not a JSON object", type(record).__name__)
            yield place, record
        except (ValueError, RecursionError) as error:  # ValueError: also a number with too many digits for Python
            problems.add(place, "invalid JSON", str(error))
        except RejectedRecord as rejected:
            problems.add(place, rejected.kind, rejected.detail)
        except MemoryError as error:
            raise OutOfMemory(place) from error


JSON_LINES = StreamFormat(Cut((b"\n",), b"\n"), _json_rows)
"""One JSON object per line; blank lines are skipped."""


def _file_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    return _text_rows([(chunk.path, chunk.payload.removeprefix(BYTE_ORDER_MARK))], problems)


def _line_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    lines = ((f"{chunk.path}:{number}", line.removesuffix(b"\r")) for number, line in _lines(chunk))
    return _text_rows(lines, problems)


def _paragraph_rows(chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    lines = enumerate(_without_mark(chunk).split(b"\n"), chunk.first)
    paragraphs = (list(group) for blank, group in groupby(lines, lambda line: not line[1].strip()) if not blank)
    records = (
        (f"{chunk.path}:{paragraph[0][0]}", b"\n".join(line for _, line in paragraph).removesuffix(b"\r"))
        for paragraph in paragraphs
    )
    return _text_rows(records, problems)


def _text_rows(records: Iterable[tuple[str, bytes]], problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    for place, raw in records:
        try:
            row = {"text": decode(raw)}
        except RejectedRecord as rejected:
            problems.add(place, rejected.kind, rejected.detail)
        else:
            yield place, row


TEXT_FORMATS: dict[str, StreamFormat] = {
    "file": StreamFormat(Cut((), b"\n"), _file_rows),
    "line": StreamFormat(Cut((b"\n",), b"\n"), _line_rows),
    # Several blank lines count as one or several ends, depending on the cut; so paragraphs are numbered by line.
    "paragraph": StreamFormat(Cut((b"\n\n", b"\n\r\n"), b"\n"), _paragraph_rows),
}
"""By ``SourceSpec.documents``. A document is the file, a line (blank ones are skipped) or a paragraph between blank
lines, without its last line ending.
"""


def decode(raw: bytes) -> str:
    """Decode UTF-8; ``RejectedRecord`` if it is invalid."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _without_mark(chunk: Chunk) -> bytes:
    return chunk.payload.removeprefix(BYTE_ORDER_MARK) if chunk.first == 1 else chunk.payload


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    for number, line in enumerate(_without_mark(chunk).split(b"\n"), chunk.first):
        if line and not line.isspace():
            yield number, line
