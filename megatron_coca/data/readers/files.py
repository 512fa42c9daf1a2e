"""The reader for files, folders and archives. The name of a file determines its format."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.columnar_files import TABLE_FORMATS, packed, table_rows
from megatron_coca.data.readers.compression import COMPRESSIONS, decompressed, members
from megatron_coca.data.readers.fields import Fields
from megatron_coca.data.readers.folders import (
    ARCHIVE,
    FORMATS,
    TEXT_SUFFIXES,
    FileKind,
    corpus_files,
    kind_of,
    unknown_type,
    unread_files,
    unread_reason,
)
from megatron_coca.data.readers.remote import local_input, remote_unit
from megatron_coca.data.readers.source import Chunk, Document, Reader, ReadingProblems, ReadUnit, SourceSpec
from megatron_coca.data.readers.streams import BLOCK, TEXT_FORMATS, StreamFormat, TooLong, pieces, raw_blocks
from megatron_coca.support.remote_files import is_url

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UNREAD = "unread"
"""The `form` of a `TypedChunk` for a file that is not read. The payload of such a chunk is the reason."""


class TypedChunk(NamedTuple):
    """Records from one file, or a `TooLong` in place of one record. `form` is the format of the file, as in `FileKind`.
    The first record has the number `chunk.first`, which is 0 if the whole file is one record. `chunk.read` is not used.
    """

    form: str
    chunk: Chunk


class FileReader(Reader):
    """Reads the files and folders in `spec.paths`.

    The payload of a chunk is a tuple of `TypedChunk` with about `block` bytes of records in total. It has one
    `TypedChunk` for a large file, or many for the small files in an archive. Raises `DataError` if `fields` or
    `documents` of `spec` has an unknown value.
    """

    uses = frozenset(("fields", "documents", "sets", "divide", "messages"))

    def __init__(self, spec: SourceSpec, block: int = BLOCK) -> None:
        if spec.documents not in TEXT_FORMATS:
            raise DataError(f"{spec.name}: documents: must be one of {', '.join(TEXT_FORMATS)}, not {spec.documents!r}")
        self.spec, self._block, self.fields = spec, block, Fields(spec)
        text_format = TEXT_FORMATS[spec.documents]
        self._formats: dict[str, StreamFormat] = {**FORMATS, **dict.fromkeys(TEXT_SUFFIXES, text_format)}

    def units(self) -> list[ReadUnit]:
        """List the files. Raises `DataError` for a path that is missing, has an unknown type, or is listed twice."""
        files = corpus_files(self.spec.paths)
        for file, times in Counter(files).items():
            if times > 1:
                raise DataError(
                    f"{file}: is listed twice in {self.spec.name}; list it once (to repeat a source, increase its "
                    "weight)"
                )
        return [file_unit(file) for file in files]

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut a file into chunks, in the order of its records. Raises `DataError` if the file is damaged."""
        kind, path, sent = kind_of(unit.path), unit.path, 0
        if kind is None:
            raise DataError(f"{path}: {unknown_type(Path(path).name)}")
        is_table = kind.form in TABLE_FORMATS
        for payload, position in self._table_payloads(path, kind.form) if is_table else self._payloads(path, kind):
            if payload or position > sent:  # the payload at the end of a file may be empty
                start, first = (payload[0].chunk.path, payload[0].chunk.first) if payload else (unit.path, 0)
                yield Chunk(start, first, payload, position - sent)
                sent = position

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        for typed in chunk.payload:
            if typed.form == _UNREAD:
                problems.leave_out(typed.chunk.payload)
                continue
            usable, left_out, faulty = 0, problems.filtered.total(), problems.faulty
            for document in self._documents(typed, problems):
                usable += 1
                yield document
            usable += problems.filtered.total() - left_out
            path, first = typed.chunk.path, typed.chunk.first
            problems.file_part(path, begins=first <= 1, usable=usable, faulty=problems.faulty - faulty)

    def _documents(self, typed: TypedChunk, problems: ReadingProblems) -> Iterator[Document]:
        form, records = typed
        if isinstance(records.payload, TooLong):
            place, length = f"{records.path}:{records.first}" if records.first else records.path, records.payload.length
            hint = "write one JSON object per line, read text by line, or increase max_record_mib"
            detail = f"{length:,} bytes, more than max_record_mib: {self.spec.max_record_mib}; {hint}"
            problems.read += length
            problems.add(place, "record too long", detail, length)
            return
        problems.read += len(records.payload)
        rows = table_rows if form in TABLE_FORMATS else self._formats[form].rows
        yield from self.fields.documents(rows(records, problems), problems)

    def stamp(self, unit: ReadUnit) -> str:
        return file_unit(unit.path).stamp

    def unread(self) -> Counter[str]:
        """Count, by reason, the skipped files in the folders of the source. The folders are listed again."""
        return unread_files(self.spec.paths)

    def _table_payloads(self, path: str, form: str) -> Iterator[tuple[tuple[TypedChunk, ...], int]]:
        """Yield (payload, bytes of the table read so far)."""
        number, size = 1, file_unit(path).size
        choose = partial(self.fields.columns, place=path)
        with local_input(path) as file:
            with _opened(file) as raw:
                _check_is_content(path, raw.read(len(_LFS_POINTER)))
            for batch, position in TABLE_FORMATS[form](file, choose, self._block):
                for rows, data in packed(batch, 2 * self._block, self.spec.max_record):
                    yield (TypedChunk(form, Chunk(path, number, data, 0)),), min(position, size)
                    number += rows
        yield (), size

    def _payloads(self, path: str, kind: FileKind) -> Iterator[tuple[tuple[TypedChunk, ...], int]]:
        """Yield (payload, bytes of the file read so far). Every payload except the last has at least `block` bytes."""
        with local_input(path) as file, _opened(file) as raw:
            _check_is_content(path, raw.read(len(_LFS_POINTER)))
            raw.seek(0)
            payload, size = list[TypedChunk](), 0
            for typed in self._typed_chunks(path, kind, raw_blocks(path, raw, self._block)):
                payload.append(typed)
                size += len(typed.chunk.payload) + len(typed.chunk.path)
                if size >= self._block:
                    yield tuple(payload), raw.tell()
                    payload, size = [], 0
            yield tuple(payload), raw.tell()

    def _typed_chunks(self, place: str, kind: FileKind, blocks: Iterator[bytes]) -> Iterator[TypedChunk]:
        """Cut a file, or all files in an archive, into typed chunks. Raises `DataError` if the data is damaged."""
        if kind.compression:
            blocks = decompressed(place, blocks, COMPRESSIONS[kind.compression], self._block)
        return self._archived(place, blocks) if kind.form == ARCHIVE else self._records(place, kind.form, blocks)

    def _archived(self, place: str, blocks: Iterator[bytes]) -> Iterator[TypedChunk]:
        for name, content in members(place, blocks):
            path, kind, reason = f"{place}!{name}", kind_of(name), unread_reason(name)
            if reason is None and kind is not None and kind.form in TABLE_FORMATS:
                reason = f"not readable in an archive ({kind.form})"
            if kind is None or reason or content is None:
                yield TypedChunk(_UNREAD, Chunk(path, 0, reason or "not a regular file", 0))
            else:
                yield from self._typed_chunks(path, kind, content)

    def _records(self, place: str, form: str, blocks: Iterator[bytes]) -> Iterator[TypedChunk]:
        lines = self._formats[form].lines
        number = int(lines)
        for records in pieces(blocks, lines, self._block, self.spec.max_record):
            yield TypedChunk(form, Chunk(place, number, records, 0))
            if lines:
                number += 1 if isinstance(records, TooLong) else records.count(b"\n")


def _check_is_content(path: str, head: bytes) -> None:
    """Raise `DataError` for a pointer of Git LFS. `git clone` writes it in place of a file if LFS is not installed."""
    if head == _LFS_POINTER:
        raise DataError(f"{path}: is a pointer of Git LFS instead of the file; run `git lfs pull` in its repository")


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error}); check the path and the permissions") from error


def file_unit(file: Path | str) -> ReadUnit:
    """Return the unit of a file or object in its current state. Raises `DataError` if it is missing or not a regular
    file.
    """
    if is_url(file):
        return remote_unit(str(file))
    try:
        status = os.stat(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}); check the path and the permissions") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{file}: is a pipe or device, not a regular file; write the content to a file and use that file"
        )
    return ReadUnit(str(file), status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def read_documents(path: Path | str, problems: ReadingProblems | None = None) -> Iterator[Document]:
    """Stream the documents of a file or folder in this process. Only one chunk, or one larger record, is in memory at a
    time.

    Unusable records are added to `problems`. Without `problems`, the first unusable record raises `DataError`. Also
    raises `DataError` for a file that is missing, unreadable, damaged or of unknown type, or that changed while it was
    read.
    """
    problems = ReadingProblems(strict=True) if problems is None else problems
    # The limit on the size of records is very large, because evaluation data is chosen by hand, and one document may be
    # a whole collection of books.
    reader = FileReader(SourceSpec(str(path), [path], max_record_mib=1024))
    for unit in reader.units():
        for chunk in reader.chunks(unit):
            yield from reader.documents(chunk, problems)
        reader.check_unchanged(unit)
