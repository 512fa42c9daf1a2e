"""Files and folders of a corpus, each file read by what its name says that it is."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.archives import members
from megatron_coca.data.readers.compression import COMPRESSIONS, decompressed
from megatron_coca.data.readers.document import Document, Problems
from megatron_coca.data.readers.fields import Fields
from megatron_coca.data.readers.folders import corpus_files
from megatron_coca.data.readers.formats import (
    ARCHIVE,
    FORMATS,
    TEXT_FORMATS,
    TEXT_SUFFIXES,
    FileKind,
    StreamFormat,
    cut_of,
    is_corpus_file,
    kind_of,
)
from megatron_coca.data.readers.source import Chunk, Row, SourceSpec, Unit
from megatron_coca.data.readers.streams import BLOCK, pieces, raw_blocks
from megatron_coca.data.readers.tables import TABLE_FORMATS, packed, table_rows

_UNREADABLE = "unreadable"


class Piece(NamedTuple):
    """Records of one format out of one file; ``chunk.read`` has no meaning."""

    form: str
    chunk: Chunk


class _Unreadable:
    """Stands for a file in an archive that no format takes."""

    delimiter = None

    def rows(self, chunk: Chunk, problems: Problems) -> Iterator[tuple[str, Row]]:
        """None."""
        problems.leave_out("not a readable file")
        return iter(())


class FileReader:
    """Reads the files that ``spec.paths`` name or hold.

    A chunk's payload is a tuple of ``Piece``: one out of a large file, or many small files of an archive.

    Args:
        block: bytes of records in a chunk, about; 1 MB where there is as much.

    Raises:
        DataError: ``spec`` asks for fields or documents that do not exist.
    """

    def __init__(self, spec: SourceSpec, block: int = BLOCK) -> None:
        if spec.documents not in TEXT_FORMATS:
            raise DataError(f"{spec.name}: a document is a {', '.join(TEXT_FORMATS)}, not {spec.documents!r}.")
        self.spec, self._block, self._fields = spec, block, Fields(spec)
        self._streams: dict[str, StreamFormat] = {
            **FORMATS,
            **dict.fromkeys(TEXT_SUFFIXES, TEXT_FORMATS[spec.documents]),
            _UNREADABLE: _Unreadable(),
        }

    def units(self) -> list[Unit]:
        """One per file. ``DataError`` for a path that is missing, of no known type, or named twice."""
        files = corpus_files([Path(path) for path in self.spec.paths])
        for file, times in Counter(files).items():
            if times > 1:
                raise DataError(f"{file}: is named twice in {self.spec.name}. Name it once; weights repeat it.")
        return [file_unit(file) for file in files]

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """Cut a file; its records keep their order. ``DataError`` where it is damaged, after what comes before."""
        kind = kind_of(unit.path)
        table = kind is not None and kind.form in TABLE_FORMATS
        sent = 0
        for bundle, position in (self._table_pieces if table else self._stream_pieces)(Path(unit.path)):
            if bundle or position > sent:  # the end of a file may hold no record
                path, first = (bundle[0].chunk.path, bundle[0].chunk.first) if bundle else (unit.path, 0)
                yield Chunk(path, first, bundle, position - sent)
                sent = position

    def documents(self, chunk: Chunk, problems: Problems) -> Iterator[Document]:
        """The documents of a chunk; what cannot be used goes to ``problems``."""
        for form, piece in chunk.payload:
            rows = table_rows if form in TABLE_FORMATS else self._streams[form].rows
            yield from self._fields.documents(rows(piece, problems), problems)

    def columns(self, names: Sequence[str], place: str) -> list[str]:
        """Those of a table's columns that are needed. ``DataError`` where none of them holds the text."""
        return self._fields.columns(names, place)

    def _stream_pieces(self, path: Path) -> Iterator[tuple[tuple[Piece, ...], int]]:
        """(pieces, bytes read from the disk so far)."""
        try:
            raw = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: cannot be opened ({error}). Check the path and its permissions.") from error
        with raw:
            blocks = raw_blocks(str(path), raw, self._block)
            for bundle in bundles(self._file_pieces(str(path), kind_of(path.name), blocks), self._block):
                yield bundle, raw.tell()
            yield (), raw.tell()

    def _file_pieces(self, place: str, kind: FileKind | None, blocks: Iterator[bytes]) -> Iterator[Piece]:
        """What a file holds, or a file in an archive: itself, or the files in it."""
        if kind is None or kind.form in TABLE_FORMATS:
            yield Piece(_UNREADABLE, Chunk(place, 0, b"", 0))
            return
        if kind.compression:
            blocks = decompressed(place, blocks, COMPRESSIONS[kind.compression], self._block)
        if kind.form == ARCHIVE:
            for name, content in members(place, blocks):
                inner = kind_of(name) if content is not None and is_corpus_file(name) else None
                yield from self._file_pieces(f"{place}!{name}", inner, content or iter(()))
        else:
            yield from self._records(place, kind.form, blocks)

    def _records(self, place: str, form: str, blocks: Iterator[bytes]) -> Iterator[Piece]:
        cut = cut_of(self._streams[form])
        number = 1 if cut.ends else 0
        for data in pieces(place, blocks, cut, self._block):
            yield Piece(form, Chunk(place, number, data, 0))
            number += data.count(cut.counted) if cut.ends else 0

    def _table_pieces(self, path: Path) -> Iterator[tuple[tuple[Piece, ...], int]]:
        form, number, size = path.suffix.lower(), 1, file_unit(path).size
        choose = partial(self.columns, place=str(path))
        for batch, position in TABLE_FORMATS[form](path, choose, self._block):
            for rows, data in packed(batch, 2 * self._block):
                yield (Piece(form, Chunk(str(path), number, data, 0)),), min(position, size)
                number += rows
        yield (), size


def file_unit(file: Path) -> Unit:
    """A file as it is now."""
    try:
        status = os.stat(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error}). Check the path and its permissions.") from error
    return Unit(str(file), status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


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


def read_documents(path: Path, text_field: str = "text", problems: Problems | None = None) -> Iterator[Document]:
    """Stream the documents of a file or folder in this process; memory holds one chunk, or one record if larger.

    Args:
        problems: gets the unusable records; without it the first one raises.

    Raises:
        DataError: a missing, unreadable, damaged or unknown file; after the documents before the damage.
    """
    problems = Problems(strict=True) if problems is None else problems
    reader = FileReader(SourceSpec(str(path), [path], fields={"text": text_field}))
    for unit in reader.units():
        for chunk in reader.chunks(unit):
            yield from reader.documents(chunk, problems)
