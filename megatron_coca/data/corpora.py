"""Readers: files of a corpus to a stream of documents.

Formats are chosen by the file's name. ``.jsonl`` and ``.json`` hold one JSON object per line, ``.txt`` is one document;
either may be compressed (``.gz``, ``.zst``). A record that cannot be used is reported, never dropped in silence.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.document import Document, Problems, RejectedRecord, content_key


def _document(text: Any, key: Any, text_field: str) -> Document:
    if not isinstance(text, str):
        raise RejectedRecord("text is not a string", f"field {text_field!r} holds {type(text).__name__}")
    if not text.strip():
        raise RejectedRecord("empty text")
    try:
        fallback = content_key(text)  # also refuses lone surrogates, which JSON escapes can spell
    except UnicodeEncodeError as error:
        raise RejectedRecord("invalid Unicode", error.reason) from error
    return Document(text, key if isinstance(key, str) and key else fallback)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _json_record(raw: bytes, text_field: str) -> Document:
    try:
        record = json.loads(_decode(raw))
    except (json.JSONDecodeError, RecursionError) as error:
        raise RejectedRecord("invalid JSON", str(error)) from error
    if not isinstance(record, dict):
        raise RejectedRecord("not a JSON object", type(record).__name__)
    if text_field not in record:
        raise RejectedRecord("missing field", f"no {text_field!r}; the record has {sorted(record)[:8]}")
    return _document(record[text_field], record.get("key"), text_field)


def _json_lines(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(stream, start=1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield f":{number}", line


def _whole_file(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    yield "", stream.read()


def _text_record(raw: bytes, text_field: str) -> Document:
    return _document(_decode(raw), None, text_field)


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError("Reading .zst needs the zstandard package: pip install zstandard") from error
    return io.BufferedReader(zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(raw), 1 << 20)


def _open_gzip(raw: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)


# How a stream falls into (place, record), and what makes a document of a record and the text field's name.
_Format = tuple[Callable[[IO[bytes]], Iterator[tuple[str, bytes]]], Callable[[bytes, str], Document]]
COMPRESSIONS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {".gz": _open_gzip, ".zst": _open_zstd}
# A name that ends in the compression alone ("wiki.zst") is taken for JSONL, the usual content of such files.
FORMATS: dict[str, _Format] = {
    ".jsonl": (_json_lines, _json_record),
    ".json": (_json_lines, _json_record),
    "": (_json_lines, _json_record),
    ".txt": (_whole_file, _text_record),
}
READABLE = ".jsonl, .json or .txt, each plain or with .gz or .zst"


def _suffixes(path: Path) -> tuple[str, str] | None:
    """(format, compression) by the file's name, or None where no reader takes it."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    inner = Path(path.stem).suffix if compression else path.suffix
    if inner in FORMATS:
        return (inner, compression) if inner or compression else None
    return ("", compression) if compression else None


def corpus_files(paths: Sequence[Path]) -> list[Path]:
    """The files that ``paths`` stand for: files as they are, folders as their readable files in sorted order.

    Raises ``DataError`` for a missing path, a file of an unknown type and a folder without a readable file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder. Check the path of the corpus.")
        found = sorted(p for p in path.rglob("*") if p.is_file() and _suffixes(p)) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path}: the folder holds no readable file ({READABLE}).")
        if _suffixes(found[0]) is None:
            raise DataError(f"{path}: unknown type of file. Readable are {READABLE}.")
        files += found
    return files


def read_documents(
    path: Path,
    text_field: str = "text",
    problems: Problems | None = None,
    on_read: Callable[[int], object] | None = None,
) -> Iterator[Document]:
    """Stream the documents of one file; memory holds one record at a time.

    A JSON record's split key is its string field ``key`` where it has one, else the SHA-256 of its text.
    Unusable records go to ``problems``; without one the first raises. ``on_read`` gets, for each record, the number of
    bytes read from disk since the last. Raises ``DataError`` for a missing, unreadable, damaged or unknown file.
    """
    problems = Problems(strict=True) if problems is None else problems
    path = corpus_files([path])[0]
    inner, compression = _suffixes(path) or ("", "")
    try:
        with path.open("rb") as raw:
            stream = COMPRESSIONS[compression](raw) if compression else raw
            yield from _documents(path, raw, FORMATS[inner], stream, text_field, problems, on_read)
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path}: cannot be read to its end ({error}). Is the file complete, and readable?") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":  # its error type exists only where it is installed
            raise
        raise DataError(f"{path}: damaged zstd data ({error}). Fetch or compress the file again.") from error


def _documents(
    path: Path,
    raw: IO[bytes],
    form: _Format,
    stream: IO[bytes],
    text_field: str,
    problems: Problems,
    on_read: Callable[[int], object] | None,
) -> Iterator[Document]:
    split, parse = form
    consumed = 0
    for place, record in split(stream):
        if on_read:
            on_read(raw.tell() - consumed)
            consumed = raw.tell()
        try:
            document = parse(record, text_field)
        except RejectedRecord as rejected:
            problems.add(f"{path}{place}", rejected.kind, rejected.detail)
            continue
        yield document
    if on_read:
        on_read(raw.tell() - consumed)
