"""Inputs on object stores: s3://, gs:// and the other file systems that fsspec supports."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron_coca.data.errors import DataError, StoreUnavailable
from megatron_coca.data.readers.source import ReadUnit
from megatron_coca.support.remote_files import RemoteFiles, is_url

TIMEOUT = 300.0
"""Number of seconds for which a failed request is repeated. A preparation takes hours, and most outages are short."""


class DataFiles(RemoteFiles):
    """Objects below a URL, which are inputs or shards. Raises `DataError` if an operation fails."""

    permanent, unavailable = DataError, StoreUnavailable

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout)


def opened(url: str) -> tuple[DataFiles, str]:
    """Return (files of the folder that contains the object at `url`, name of the object)."""
    folder, _, name = url.rstrip("/").rpartition("/")
    return DataFiles(folder), name


def path_below(root: Path | str, text: str) -> Path | str:
    """Return the path `text` below `root`, which may be a URL. If `text` is itself a URL, return it unchanged."""
    if is_url(text):
        return text
    text = os.path.expanduser(text)
    return f"{str(root).rstrip('/')}/{text}" if is_url(root) else Path(os.path.expanduser(root)) / text


def matching(url: str) -> list[str]:
    """Return the URLs that match a pattern with `*`, `?` or `[`."""
    parts = url.split("/")
    fixed = next(number for number, part in enumerate(parts) if set(part) & set("*?["))
    folder = "/".join(parts[:fixed])
    return [f"{folder}/{name}" for name in DataFiles(folder).matches("/".join(parts[fixed:]))]


def remote_unit(url: str) -> ReadUnit:
    """Return the unit of an object in its current state. Raises `DataError` if the object does not exist."""
    files, name = opened(url)
    facts = files.facts(name)
    if facts is None:
        raise DataError(f"{url}: no such object; check the path of the corpus")
    return ReadUnit(url, facts[0], f"{facts[0]}-{facts[1]}")


@contextlib.contextmanager
def local_input(path: str) -> Iterator[Path]:
    """Yield the path of the local file to read. An object is first downloaded to a temporary folder. Raises `DataError`
    if the download fails.
    """
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
