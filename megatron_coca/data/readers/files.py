"""Files and folders of a corpus, each file read by what its name says that it is."""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.readers.compression import COMPRESSIONS, WINDOW, Content, decompressed, members
from megatron_coca.data.readers.fields import Fields
from megatron_coca.data.readers.folders import (
    ARCHIVE,
    ENDINGS,
    FORMATS,
    TEXT_SUFFIXES,
    FileKind,
    corpus_files,
    cut_of,
    kind_of,
    unknown_type,
    unread_files,
    unread_reason,
)
from megatron_coca.data.readers.source import Chunk, Document, ReadingProblems, ReadUnit, Row, SourceSpec, check_keys
from megatron_coca.data.readers.streams import BLOCK, TEXT_FORMATS, StreamFormat, TooLong, pieces, raw_blocks
from megatron_coca.data.readers.tables import TABLE_FORMATS, packed, table_rows
from megatron_coca.data.readers.wikipedia import settled

UNREAD, TOO_LONG = "unread", "too long"
_TOLD = 20  # damaged files of an archive that a message names


class Piece(NamedTuple):
    """Records of one format out of one file; ``chunk.read`` has no meaning."""

    form: str
    chunk: Chunk


class Unread:
    """Stands for a file in an archive that no format takes; the payload is the reason."""

    delimiter: ClassVar[None] = None

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """None."""
        problems.leave_out(chunk.payload.decode())
        return iter(())


class LongRecord:
    """Stands for a record that is longer than ``SourceSpec.max_record_mib`` allows; the payload says how long."""

    delimiter: ClassVar[None] = None

    def rows(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[tuple[str, Row]]:
        """None; the record is reported."""
        place = f"{chunk.path}:{chunk.first}" if chunk.first else chunk.path
        problems.add(place, "record too long", chunk.payload.decode())
        return iter(())


def long_record(path: str, number: int, record: TooLong, limit: int) -> Piece:
    """The piece that reports record ``number`` of a file, 0 where the file is one record."""
    hint = "write one JSON object per line, read text by line or paragraph, or raise it"
    detail = f"{record.length:,} bytes, more than max_record_mib: {limit >> 20}; {hint}"
    return Piece(TOO_LONG, Chunk(path, number, detail.encode(), 0))


class Contents:
    """Cuts streams of bytes.

    Args:
        streams: formats by ``FileKind.form``, and ``UNREAD``.
        block: bytes of records in a piece, about.
        limit: bytes of a record.
    """

    def __init__(self, streams: Mapping[str, StreamFormat], block: int, limit: int) -> None:
        self._streams, self._block, self._limit = streams, block, limit

    def pieces(self, place: str, kind: FileKind, blocks: Iterator[bytes]) -> Iterator[Piece]:
        """What a file holds, or a file in an archive: itself, or the files in it. ``DataError`` where it is damaged."""
        if kind.compression:
            window = max(WINDOW, self._limit)
            blocks = decompressed(place, blocks, COMPRESSIONS[kind.compression], self._block, window)
        if kind.form == ARCHIVE:
            yield from self._archived(place, blocks)
        else:
            yield from self._records(place, kind.form, blocks)

    def _archived(self, place: str, blocks: Iterator[bytes]) -> Iterator[Piece]:
        """A damaged file in an archive that goes on behind it does not hide the others; the error comes at the end."""
        damaged = ReadingProblems()
        try:
            for name, content in members(place, blocks):
                try:
                    yield from self._member(f"{place}!{name}", name, content)
                except DataError as error:
                    if content is None or content.lost or isinstance(error, OutOfMemory):
                        raise
                    damaged.add(f"{place}!{name}", "damaged", str(error).removeprefix(f"{place}!{name}: "))
        except DataError as error:
            if damaged.total:
                raise DataError(f"{error} Before that, {_told(damaged)}") from error
            raise
        if damaged.total:
            raise DataError(f"{place}: {_told(damaged)} Replace the archive.")

    def _member(self, place: str, name: str, content: Content | None) -> Iterator[Piece]:
        kind, reason = kind_of(name), unread_reason(name)
        if reason is None and kind is not None and kind.form in TABLE_FORMATS:
            reason = f"not readable in an archive ({kind.form})"
        if kind is None or reason or content is None:
            reason = reason or "not a regular file"
            yield Piece(UNREAD, Chunk(place, 0, reason.encode(), 0))
        else:
            yield from self.pieces(place, kind, content)

    def _records(self, place: str, form: str, blocks: Iterator[bytes]) -> Iterator[Piece]:
        form, blocks = settled(form, blocks)
        cut = cut_of(self._streams[form])
        number, last = 1 if cut.ends else 0, b""
        try:
            for records in pieces(place, blocks, cut, self._block, self._limit):
                if isinstance(records, TooLong):
                    yield long_record(place, number, records, self._limit)
                    counted, last = records.counted, b""
                else:
                    yield Piece(form, Chunk(place, number, records, 0))
                    counted, last = records.count(cut.counted), records
                number += counted if cut.ends else 0
        except MemoryError as error:
            raise OutOfMemory(f"{place}:{number}" if number else place) from error
        ending = ENDINGS.get(form, b"")
        if ending and not last.rstrip().endswith(ending):
            raise DataError(
                f"{place}: cannot be read to its end (there is no {ending.decode()}). Is the file complete?"
            )


def _told(damaged: ReadingProblems) -> str:
    more = ", ..." if damaged.total > _TOLD else ""
    return f"{damaged.total} damaged in it, read as far as they go: {', '.join(damaged.named[:_TOLD])}{more}."


def bundles(found: Iterator[Piece], size: int) -> Iterator[tuple[Piece, ...]]:
    """Pieces together until they hold ``size`` bytes; what was gathered before a ``DataError`` comes before it."""
    held: list[Piece] = []
    weight = 0
    try:
        for piece in found:
            held.append(piece)
            weight += len(piece.chunk.payload) + len(piece.chunk.path)
            if weight >= size:
                yield tuple(held)
                held, weight = [], 0
    except DataError:
        if held:
            yield tuple(held)
        raise
    if held:
        yield tuple(held)


class FileReader:
    """Reads the files that ``spec.paths`` name or hold.

    A chunk's payload is a tuple of ``Piece``: one out of a large file, or many small files of an archive.

    Args:
        block: bytes of records in a chunk, about; 1 MB where there is as much.

    Raises:
        DataError: ``spec`` asks for fields or documents that do not exist, or has keys that mean nothing here.
    """

    def __init__(self, spec: SourceSpec, block: int = BLOCK) -> None:
        check_keys(spec, "files")
        if spec.documents not in TEXT_FORMATS:
            raise DataError(f"{spec.name}: a document is a {', '.join(TEXT_FORMATS)}, not {spec.documents!r}.")
        self.spec, self._block, self._fields = spec, block, Fields(spec)
        self._streams: dict[str, StreamFormat] = {
            **FORMATS,
            **dict.fromkeys(TEXT_SUFFIXES, TEXT_FORMATS[spec.documents]),
            UNREAD: Unread(),
            TOO_LONG: LongRecord(),
        }
        self._contents = Contents(self._streams, block, spec.max_record)

    def units(self) -> list[ReadUnit]:
        """One per file. ``DataError`` for a path that is missing, of no known type, or named twice."""
        files = corpus_files([Path(path) for path in self.spec.paths])
        for file, times in Counter(files).items():
            if times > 1:
                raise DataError(f"{file}: is named twice in {self.spec.name}. Name it once; weights repeat it.")
        return [file_unit(file) for file in files]

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut a file; its records keep their order. ``DataError`` where it is damaged, after what comes before.

        Damaged files in a sound archive do not hide those after them: the error follows at the end, and names them.
        """
        kind, path, sent = kind_of(unit.path), Path(unit.path), 0
        if kind is None:
            raise DataError(f"{path}: {unknown_type(path.name)}")
        found = self._table_pieces(path, kind.form) if kind.form in TABLE_FORMATS else self._stream_pieces(path, kind)
        for bundle, position in found:
            if bundle or position > sent:  # the end of a file may hold no record
                place, first = (bundle[0].chunk.path, bundle[0].chunk.first) if bundle else (unit.path, 0)
                yield Chunk(place, first, bundle, position - sent)
                sent = position

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """The documents of a chunk; what cannot be used goes to ``problems``."""
        for form, piece in chunk.payload:
            rows = table_rows if form in TABLE_FORMATS else self._streams[form].rows
            try:
                yield from self._fields.documents(rows(piece, problems), problems)
            except MemoryError as error:
                raise OutOfMemory(place_of(piece)) from error

    def unread(self) -> Counter[str]:
        """Files in the folders of the source that are none of its units, by the reason."""
        return unread_files([Path(path) for path in self.spec.paths])

    def columns(self, names: Sequence[str], place: str) -> list[str]:
        """Those of a table's columns that are needed. ``DataError`` where none of them holds the text."""
        return self._fields.columns(names, place)

    def _stream_pieces(self, path: Path, kind: FileKind) -> Iterator[tuple[tuple[Piece, ...], int]]:
        """(pieces, bytes read from the disk so far)."""
        try:
            raw = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened ({error}). Check the path and its permissions.") from error
        with raw:
            blocks = raw_blocks(str(path), raw, self._block)
            for bundle in bundles(self._contents.pieces(str(path), kind, blocks), self._block):
                yield bundle, raw.tell()
            yield (), raw.tell()

    def _table_pieces(self, path: Path, form: str) -> Iterator[tuple[tuple[Piece, ...], int]]:
        number, size = 1, file_unit(path).size
        choose = partial(self.columns, place=str(path))
        try:
            for batch, position in TABLE_FORMATS[form](path, choose, self._block):
                for rows, data in packed(batch, 2 * self._block, self.spec.max_record):
                    yield (table_piece(form, str(path), number, data, self.spec.max_record),), min(position, size)
                    number += rows
        except MemoryError as error:
            raise OutOfMemory(f"{path}:{number}") from error
        yield (), size


def table_piece(form: str, path: str, number: int, data: bytes | TooLong, limit: int) -> Piece:
    """The piece for what ``packed`` gave."""
    if isinstance(data, TooLong):
        return long_record(path, number, data, limit)
    return Piece(form, Chunk(path, number, data, 0))


def place_of(chunk: Chunk) -> str:
    """Where a chunk begins, as messages name it."""
    return f"{chunk.path}:{chunk.first}" if chunk.first else chunk.path


def file_unit(file: Path) -> ReadUnit:
    """A file as it is now. ``DataError`` for one that is missing, or that only looks like a file, such as a pipe."""
    try:
        status = os.stat(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}). Check the path and its permissions.") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{file}: is a pipe, a device or the like. Write its content into a file and name that.")
    return ReadUnit(str(file), status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def read_documents(path: Path, text_field: str = "text", problems: ReadingProblems | None = None) -> Iterator[Document]:
    """Stream the documents of a file or folder in this process; memory holds one chunk, or one record if larger.

    Args:
        problems: gets the unusable records; without it the first one raises.

    Raises:
        DataError: a missing, unreadable, damaged or unknown file; after the documents before the damage.
    """
    problems = ReadingProblems(strict=True) if problems is None else problems
    # One document may be a whole book collection: what is evaluated on is chosen, not collected.
    reader = FileReader(SourceSpec(str(path), [path], fields={"text": text_field}, max_record_mib=1024))
    for unit in reader.units():
        for chunk in reader.chunks(unit):
            yield from reader.documents(chunk, problems)
