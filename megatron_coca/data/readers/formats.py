"""What lies in a stream of bytes: JSON lines, text, Wikipedia's XML. Formats are chosen by the file's name."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath
from typing import Any, Protocol

from megatron_coca.data.readers.compression import COMPRESSIONS
from megatron_coca.data.readers.document import Problems, RejectedRecord
from megatron_coca.data.readers.source import Chunk, Row
from megatron_coca.data.readers.streams import Cut
from megatron_coca.data.readers.tables import TABLE_FORMATS
from megatron_coca.data.readers.wikipedia import WikipediaPages

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class StreamFormat(Protocol):
    """A format whose records follow one another, so that a file can be cut anywhere between two of them."""

    @property
    def delimiter(self) -> bytes | None:
        """A record ends after it; None where the stream is one record."""
        ...

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
        """(place, record) of each record in ``chunk.payload`` (bytes), the first of which is number ``chunk.first``.

        A place is "path:number". What is not a record of this format goes to ``problems``.
        """
        ...


class JsonLines:
    """One JSON object a line; blank lines are nothing."""

    delimiter = b"\n"

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
        """The objects, by their line."""
        for number, line in _lines(chunk):
            place = f"{chunk.path}:{number}"
            try:
                if number == 1 and (reason := _not_json_lines(line)):
                    raise RejectedRecord("not JSON lines", reason)
                yield place, _json_object(line)
            except RejectedRecord as rejected:
                problems.add(place, rejected.kind, rejected.detail)


class TextFile:
    """A text that is one document."""

    delimiter = None

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
        """One row with ``text``, by the file alone."""
        yield from _text_rows([(chunk.path, chunk.payload.removeprefix(_BYTE_ORDER_MARK))], problems)


class TextLines:
    """A text in which each line is a document; blank lines are nothing."""

    delimiter = b"\n"

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
        """Rows with ``text``, without the line's end, by their line."""
        lines = ((f"{chunk.path}:{number}", line.removesuffix(b"\r")) for number, line in _lines(chunk))
        yield from _text_rows(lines, problems)


class TextParagraphs:
    """A text in which each stretch between blank lines is a document."""

    delimiter = b"\n\n"

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
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
TEXT_SUFFIXES = (".txt", ".text", ".md")
# A name that ends in the compression alone ("wiki.zst") is taken for JSON lines, the usual content of such files.
FORMATS: dict[str, StreamFormat] = {
    **dict.fromkeys((".jsonl", ".json", ".ndjson", ""), JsonLines()),
    ".xml": WikipediaPages(),
}
ARCHIVE = ".tar"
_SHORT = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
READABLE = (
    ".jsonl, .json, .ndjson, .txt, .text, .md, .xml (Wikipedia) or .tar, each plain or with .gz, .zst, .bz2 or .xz; "
    ".parquet, .arrow"
)
# Descriptions that lie beside data; taken for documents they would be read, or reported as damaged.
_BESIDE_DATA = ("readme.md", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")

# A run of line ends holds several blank lines, or one, by where it is cut; so paragraphs go by the number of the line.
_CUTS: dict[bytes | None, Cut] = {
    None: Cut((), counted=b"\n"),
    TextParagraphs.delimiter: Cut((b"\n\n", b"\n\r\n"), counted=b"\n"),
}


@dataclass(frozen=True)
class FileKind:
    """What a file's name says.

    Attributes:
        form: suffix of what is inside: of ``FORMATS``, ``TEXT_SUFFIXES``, ``TABLE_FORMATS``, or ``ARCHIVE``.
        compression: a suffix of ``COMPRESSIONS``, or empty.
    """

    form: str
    compression: str


def kind_of(name: str) -> FileKind | None:
    """By the end of a file's name, without regard to case; None where no reader takes it."""
    lower = PurePath(name).name.lower()
    lower = next((lower.removesuffix(short) + long for short, long in _SHORT.items() if lower.endswith(short)), lower)
    compression = PurePath(lower).suffix if PurePath(lower).suffix in COMPRESSIONS else ""
    inner = PurePath(lower.removesuffix(compression)).suffix
    if inner in TABLE_FORMATS:
        return None if compression else FileKind(inner, "")
    if inner and inner in (*FORMATS, *TEXT_SUFFIXES, ARCHIVE):
        return FileKind(inner, compression)
    return FileKind("", compression) if compression else None


def is_corpus_file(name: str) -> bool:
    """Whether a file in a folder or an archive is read: of a known kind, not hidden, not a description of the data."""
    base = PurePath(name).name
    return kind_of(base) is not None and not base.startswith(".") and base.lower() not in _BESIDE_DATA


def cut_of(form: StreamFormat) -> Cut:
    """Where a stream of this format may be cut."""
    end = form.delimiter
    return _CUTS.get(end) or Cut((end or b"",), end or b"")


def decode(raw: bytes) -> str:
    """UTF-8 to text; ``RejectedRecord`` where it is none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _unmarked(chunk: Chunk) -> bytes:
    return chunk.payload.removeprefix(_BYTE_ORDER_MARK) if chunk.first == 1 else chunk.payload


def _lines(chunk: Chunk) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines that are not blank."""
    for number, line in enumerate(_unmarked(chunk).split(b"\n"), chunk.first):
        if line and not line.isspace():
            yield number, line


def _text_rows(records: Iterable[tuple[str, bytes]], problems: Problems) -> Iterator[tuple[str, Row]]:
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
