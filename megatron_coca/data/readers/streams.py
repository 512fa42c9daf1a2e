"""Files as blocks of bytes, and blocks cut where records end."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Any, NamedTuple, Protocol

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.readers.source import Chunk, ReadingProblems, RejectedRecord, Row

BLOCK = 1 << 20  # bytes; a chunk is at least one block where there is as much, and little more


@dataclass(frozen=True)
class Cut:
    """Where a stream may be cut.

    Attributes:
        ends: a record ends after each of these; none where the whole stream is one record.
        counted: what tells how many records went by. Its occurrences must not overlap, so that they add up.
    """

    ends: tuple[bytes, ...]
    counted: bytes


def raw_blocks(place: str, raw: IO[bytes], size: int) -> Iterator[bytes]:
    """The bytes of an open file in blocks of ``size``; ``DataError`` where the disk does not give them."""
    while True:
        try:
            block = raw.read(size)
        except OSError as error:
            raise DataError(f"{place}: cannot be read to its end ({error}). Check the disk and the file.") from error
        if not block:
            return
        yield block


class TooLong(NamedTuple):
    """Stands for a record that is longer than the limit.

    Attributes:
        length: bytes of the record, with its delimiter.
        counted: how often ``Cut.counted`` occurs in it.
    """

    length: int
    counted: int


def pieces(place: str, blocks: Iterable[bytes], cut: Cut, size: int, limit: int) -> Iterator[bytes | TooLong]:
    """Whole records, about ``size`` bytes of them at a time; a longer record is gathered until it ends.

    What follows the last delimiter is a record too, unless the stream turns out to be damaged there: then the complete
    records come first and the ``DataError`` after them. Of a record of more than ``limit`` bytes only its length is
    given, and never more than about ``limit + size`` bytes of it are held.

    Raises ``DataError`` as ``blocks`` does.
    """
    held, searched, dropped = bytearray(), 0, TooLong(0, 0)
    try:
        for block in blocks:
            held += block
            if len(held) < size:
                continue
            if end := _last_end(held, cut.ends, searched):
                yield from _within(limit, _head(held, end), cut, dropped)
                del held[:end]
                dropped = TooLong(0, 0)
            elif dropped.length or len(held) > limit:
                dropped = _dropped(held, cut, dropped)
            searched = len(held)
    except DataError:
        if end := _last_end(held, cut.ends, searched):
            yield from _within(limit, _head(held, end), cut, dropped)
        raise
    if held or dropped.length or not cut.ends:
        yield from _within(limit, bytes(held), cut, dropped)


def _dropped(held: bytearray, cut: Cut, before: TooLong) -> TooLong:
    """Empty ``held``, which no record ends in, but for what may be the beginning of a delimiter; what was dropped."""
    end = max(0, len(held) + 1 - max(map(len, cut.ends), default=1))
    dropped = TooLong(before.length + end, before.counted + (held.count(cut.counted, 0, end) if cut.counted else 0))
    del held[:end]
    return dropped


def _within(limit: int, records: bytes, cut: Cut, dropped: TooLong) -> Iterator[bytes | TooLong]:
    """The records, with those that are too long taken out; of the first, ``dropped`` bytes came before."""
    if not dropped.length and len(records) <= limit:
        yield records
        return
    begin, start = 0, 0  # of the records that are not given yet, and of this one
    for end in _ends(records, cut):
        length = dropped.length + end - start
        if length > limit:
            if start > begin:
                yield records[begin:start]
            yield TooLong(length, dropped.counted + records.count(cut.counted, start, end))
            begin, dropped = end, TooLong(0, 0)
        start = end
    if begin < len(records):
        yield records[begin:]


def _ends(records: bytes, cut: Cut) -> Iterator[int]:
    """Where each record ends."""
    end = 0
    for found in re.finditer(b"|".join(map(re.escape, cut.ends)), records) if cut.ends else ():
        end = found.end()
        yield end
    if end < len(records) or not end:
        yield len(records)


def _last_end(held: bytearray, ends: tuple[bytes, ...], searched: int) -> int:
    """Length of ``held`` up to the last delimiter; 0 where there is none. None lies within the first ``searched``."""
    found = ((held.rfind(end, max(0, searched - len(end) + 1)), end) for end in ends)
    return max((at + len(end) for at, end in found if at >= 0), default=0)


def _head(held: bytearray, end: int) -> bytes:
    with memoryview(held) as view:
        return bytes(view[:end])


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StreamFormat(Protocol):
    """A format whose records follow one another, so that a file can be cut anywhere between two of them."""

    @property
    def delimiter(self) -> bytes | None:
        """A record ends after it; None where the stream is one record."""
        ...

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """(place, record) of each record in ``chunk.payload`` (bytes), the first of which is number ``chunk.first``.

        A place is "path:number". What is not a record of this format goes to ``problems``.
        """
        ...


class JsonLines:
    """One JSON object a line; blank lines are nothing."""

    delimiter = b"\n"

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """The objects, by their line."""
        for number, line in _lines(chunk):
            place = f"{chunk.path}:{number}"
            try:
                if number == 1 and (reason := _not_json_lines(line)):
                    raise RejectedRecord("not JSON lines", reason)
                yield place, _json_object(line)
            except RejectedRecord as rejected:
                problems.add(place, rejected.kind, rejected.detail)
            except MemoryError as error:
                raise OutOfMemory(place) from error


class TextFile:
    """A text that is one document."""

    delimiter = None

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """One row with ``text``, by the file alone."""
        yield from _text_rows([(chunk.path, chunk.payload.removeprefix(BYTE_ORDER_MARK))], problems)


class TextLines:
    """A text in which each line is a document; blank lines are nothing."""

    delimiter = b"\n"

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """Rows with ``text``, without the line's end, by their line."""
        lines = ((f"{chunk.path}:{number}", line.removesuffix(b"\r")) for number, line in _lines(chunk))
        yield from _text_rows(lines, problems)


class TextParagraphs:
    """A text in which each stretch between blank lines is a document."""

    delimiter = b"\n\n"

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """Rows with ``text``, without the last line's end, by their first line."""
        yield from _text_rows(self._paragraphs(chunk), problems)

    @staticmethod
    def _paragraphs(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
        lines = enumerate(_unmarked(chunk).split(b"\n"), chunk.first)
        for blank, group in groupby(lines, key=lambda numbered: not numbered[1].strip()):
            if not blank:
                (first, line), *rest = group
                yield f"{chunk.path}:{first}", b"\n".join([line, *(more for _, more in rest)]).removesuffix(b"\r")


TEXT_FORMATS: dict[str, StreamFormat] = {"file": TextFile(), "line": TextLines(), "paragraph": TextParagraphs()}
"""By ``SourceSpec.documents``."""


def decode(raw: bytes) -> str:
    """UTF-8 to text; ``RejectedRecord`` where it is none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _unmarked(chunk: Chunk) -> bytes:
    return chunk.payload.removeprefix(BYTE_ORDER_MARK) if chunk.first == 1 else chunk.payload


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    for number, line in enumerate(_unmarked(chunk).split(b"\n"), chunk.first):
        if line and not line.isspace():
            yield number, line


def _text_rows(records: Iterable[tuple[str, bytes]], problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
    for place, raw in records:
        try:
            row = {"text": decode(raw)}
        except RejectedRecord as rejected:
            problems.add(place, rejected.kind, rejected.detail)
        else:
            yield place, row


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(decode(line))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
        raise RejectedRecord("invalid JSON", str(error)) from error
    if not isinstance(record, dict):
        raise RejectedRecord("not a JSON object", type(record).__name__)
    return record


def _not_json_lines(line: bytes) -> str | None:
    """What a file that begins like this is instead."""
    text = line.strip()
    whole = text in (b"[", b"{") or text[:1] == b"[" and text[1:].lstrip()[:1] == b"{"
    return "it seems to be one JSON value; write one object a line, as jq -c '.[]' does" if whole else None
