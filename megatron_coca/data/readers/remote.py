"""Inputs on object stores: s3://, gs:// and the other file systems of fsspec."""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Self

from megatron_coca.data.errors import DataError, StoreUnavailable
from megatron_coca.data.readers.source import ReadUnit
from megatron_coca.remote_files import RemoteFiles, is_url

STREAM_BYTES = 8 << 20
"""Bytes of one request; a stream has two of these in memory."""
TIMEOUT = 300.0
"""Seconds for which a failed request is repeated: a preparation takes hours, a store comes back."""


class DataFiles(RemoteFiles):
    """Objects below a URL, as inputs or shards. Raises DataError."""

    refused, away = DataError, StoreUnavailable

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout)


def opened(url: str) -> tuple[DataFiles, str]:
    """The folder of a URL, and the last part of its path."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return DataFiles(folder), name


def joined(root: Path | str, text: str) -> Path | str:
    """A path below `root`, of which either may be a URL."""
    if is_url(text):
        return text
    return f"{str(root).rstrip('/')}/{text}" if is_url(root) else Path(root) / text


def matching(url: str) -> list[str]:
    """The URLs that match a pattern with `*`, `?` or `[`."""
    parts = url.split("/")
    fixed = next(number for number, part in enumerate(parts) if set(part) & set("*?["))
    folder = "/".join(parts[:fixed])
    return [f"{folder}/{name}" for name in DataFiles(folder).matches("/".join(parts[fixed:]))]


def remote_unit(url: str) -> ReadUnit:
    """The unit of an object in its present state. ``DataError`` if there is none."""
    files, name = opened(url)
    facts = files.facts(name)
    if facts is None:
        raise DataError(f"{url}: no such object. Check the path of the corpus.")
    return ReadUnit(url, facts[0], f"{facts[0]}-{facts[1]}")


def remote_names(url: str) -> tuple[list[str], Counter[str]]:
    """Names below a URL without hidden files and folders, sorted, and counts of those."""
    names = DataFiles(url).names()
    shown = sorted(name for name in names if not any(part.startswith(".") for part in PurePosixPath(name).parts))
    return shown, +Counter({"hidden file": len(names) - len(shown)})


class RemoteStream:
    """Reads an object from its beginning to its end, one request ahead. A context manager.

    Raises ``DataError`` at the end if the object was replaced in the meantime.
    """

    def __init__(self, unit: ReadUnit) -> None:
        self._unit, (self._files, self._name) = unit, opened(unit.path)
        self._threads = ThreadPoolExecutor(1)
        self._block, self._used, self._position, self._requested = b"", 0, 0, 0
        self._ahead: Future[bytes] | None = None

    def __enter__(self) -> Self:
        self._request()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.hurry.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes; empty at the end."""
        if self._used == len(self._block):
            if self._ahead is None:
                return b""
            self._block, self._used = self._ahead.result(), 0
            self._request()
        taken = self._block[self._used : self._used + size]
        self._used += len(taken)
        self._position += len(taken)
        return taken

    def _request(self) -> None:
        begin, end = self._requested, min(self._requested + STREAM_BYTES, self._unit.size)
        self._requested, self._ahead = end, None
        if begin < end:
            self._ahead = self._threads.submit(self._files.read, self._name, begin, end)
        elif remote_unit(self._unit.path) != self._unit:
            raise DataError(f"{self._unit.path}: was replaced while it was read. Run the same command again.")


def open_input(path: str) -> Any:
    """A context manager of a file to read forwards, with ``read`` and ``tell``. ``DataError`` where it is missing."""
    if is_url(path):
        return RemoteStream(remote_unit(path))
    try:
        return Path(path).open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error}). Check the path and its permissions.") from error


@contextlib.contextmanager
def local_input(path: str) -> Iterator[Path]:
    """A file that can be read in any order: an object is downloaded to a temporary folder."""
    if not is_url(path):
        yield Path(path)
        return
    files, name = opened(path)
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, name)
        files.get(name, local)
        try:
            yield local
        except DataError as error:
            raise DataError(str(error).replace(str(local), path)) from error
