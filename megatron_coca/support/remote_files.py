"""Files on object stores through fsspec: S3, Google Cloud Storage and every other file system that it supports.

Endpoint, credentials and other options are configured in fsspec and the store's own library.
"""

import errno
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from megatron_coca.support.atomic_write import flush
from megatron_coca.support.errors import UNAVAILABLE, InputError
from megatron_coca.support.plain_text import password

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = 20.0
"""Seconds for which a failed transfer is repeated by commands that only read."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the second attempt of a transfer, doubled up to the second value."""
REFUSALS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors that do not pass by themselves: of the store, which answers, or of the local disk."""
REFUSED = {"FileNotFoundError", "PermissionError", "NotImplementedError", "NoCredentialsError"}
"""The same, of libraries that set no number."""
TRANSFERS = 8
"""Concurrent transfers."""
WITH_FOLDERS = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "webdav"})
"""Kinds of stores that keep folders without files."""
HUB = "hf://"
"""Prefix of a name of the Hugging Face hub."""


def hub_hint(path: str | Path) -> str:
    """The end of a message on a missing folder whose name is like one of the Hugging Face hub, otherwise nothing.

    Nothing too in folders that exist, and in runs/ and models/, where runs and models are local.
    """
    local = Path(path).parts[:1] in (("runs",), ("models",)) or Path(path).parent.is_dir()
    if local or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return ""
    return (
        f"; a model of the Hugging Face hub is downloaded by `hf download {path} --local-dir "
        f"models/{Path(path).name}`, or named as {HUB}{path}"
    )


def is_url(path: str | Path) -> bool:
    """Return whether `path` is a URL of an object store (s3://, gs://, memory://, ...)."""
    return "://" in str(path)


def local_folder(url: str, cache: str | Path, refused: type[InputError]) -> Path:
    """The folder below `cache` for files of `url`: s3://a/b -> CACHE/s3/a/b."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise refused(f"{url}: not the URL of a folder; write for example s3://bucket/runs/coca")
    parts[0] = re.sub(r":.*@", "@", parts[0])  # a password is no part of a folder's name
    return Path(cache, scheme, *parts)


class UnavailableError(InputError):
    """An object store does not answer. Nothing is wrong with the input: the same command works when it is back."""

    status = UNAVAILABLE


class RemoteFiles:
    """The objects below a URL; names are relative to it.

    A failed transfer is repeated until it succeeds, `timeout` seconds have passed since it first failed, or `hurry` is
    set; then an error of the class `away` names the URL. What the store refuses is an error of the class `refused`.

    Attributes:
        hurry: set to give up at the next failure.
        activity: a number that grows while bytes are transferred or attempts are made.
    """

    refused: type[InputError] = InputError
    away: type[InputError] = UnavailableError

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        """Raises `refused` if no installed library supports the scheme of `url`."""
        import fsspec
        from fsspec.callbacks import Callback

        self.url, self._timeout = url.rstrip("/"), timeout
        self.hurry, self.activity = threading.Event(), 0
        self._progress = Callback(hooks={"activity": lambda *_, **__: self._moved()})
        # The local file system of fsspec creates a file's folders only on request.
        options = {"auto_mkdir": True} if self.url.partition("://")[0] in ("file", "local") else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except (ImportError, ValueError, OSError) as error:
            raise self.refused(
                f"{url}: cannot be opened ({error}); check the address and the network; s3:// needs the package s3fs, "
                "gs:// needs gcsfs"
            ) from error

    def names(self, root: str = "") -> list[str]:
        """Names of all objects below the folder `root`, relative to it; none if there is no such folder."""
        folder = f"{self._root}/{root}".rstrip("/")

        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return self._fs.find(folder)
            except FileNotFoundError:
                return []

        return [path.removeprefix(folder).lstrip("/") for path in self._attempt("cannot be listed", find)]

    def matches(self, pattern: str) -> list[str]:
        """Names that match a pattern with `*`, `?` or `[`, sorted."""
        found = self._attempt("cannot be listed", lambda: self._fs.glob(f"{self._root}/{pattern}"))
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def facts(self, name: str) -> tuple[int, str] | None:
        """Size of an object and a text that changes with its content; None if there is none."""

        def info() -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return found if found["type"] == "file" else None

        found = self._attempt(f"{name} cannot be read", info)
        if found is None:
            return None
        tags = (found.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created"))
        return found["size"], str(next((tag for tag in tags if tag is not None), ""))

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        """The content of an object, or bytes `start` to `end` of it."""
        content: bytes = self._attempt(
            f"{name} cannot be read", lambda: self._fs.cat_file(self._path(name), start=start, end=end)
        )
        return content

    def read_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Several ranges of an object, requested at the same time."""
        paths = [self._path(name)] * len(starts)

        def ranges() -> list[bytes]:
            return list(self._fs.cat_ranges(paths, list(starts), list(ends), on_error="raise"))

        return self._attempt(f"{name} cannot be read", ranges)

    def put(self, source: Path, name: str) -> None:
        """Upload a file and compare the sizes."""
        target = self._path(name)

        def put() -> None:
            self._fs.put_file(str(source), target, callback=self._progress)
            if self._fs.size(target) != source.stat().st_size:
                raise OSError("the uploaded object and the file differ in size")

        self._attempt(f"{name} cannot be uploaded", put)

    def get(self, name: str, target: Path) -> None:
        """Download an object."""
        target.parent.mkdir(parents=True, exist_ok=True)
        self._attempt(
            f"{name} cannot be downloaded",
            lambda: self._fs.get_file(self._path(name), str(target), callback=self._progress),
        )
        flush(target)

    def remove_object(self, name: str) -> None:
        """Remove an object, if it is there."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                logger.debug("%s: %s was already removed", self.url, name)

        self._attempt(f"{name} cannot be removed", remove)

    def remove_folders(self, root: str) -> None:
        """Remove the folder `root` and those in it, if they are empty; object stores have none."""
        kinds = self._fs.protocol
        if WITH_FOLDERS.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
            return
        folder = self._path(root)
        try:
            for path in sorted([folder, *self._fs.find(folder, withdirs=True)], key=len, reverse=True):
                self._fs.rmdir(path)
        except OSError as error:
            logger.debug("%s: %s stays (%s)", self.url, root, error)

    def each(self, names: Iterable[str], transfer: Callable[[str], Any]) -> None:
        """Call `transfer` for every name concurrently; raises the first error when all have ended."""
        with ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(transfer, list(names)):
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _attempt(self, problem: str, action: Callable[[], T]) -> T:
        """The result of `action`, repeated while the store does not answer.

        Raises:
            away: it did not answer for the timeout.
            refused: it refused, or the local disk is full or read-only.
        """
        pause, first_failure = FIRST_PAUSE, None
        while True:
            self._moved()
            try:
                return action()
            except Exception as error:  # each store's library has its own exception classes
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                reason = reason if (secret := password(self.url)) is None else reason.replace(secret, "***")
                if getattr(error, "errno", None) in REFUSALS or type(error).__name__ in REFUSED:
                    raise self.refused(f"{self.url}: {problem} ({reason})") from error
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                left = first_failure + self._timeout - now
                if left <= 0 or self.hurry.is_set():
                    since = f"for {now - first_failure:.0f} s" if first_failure < now else "now"
                    raise self.away(f"{self.url}: {problem} {since} ({reason})") from error
                pause = min(pause, left)
                logger.warning("%s: %s (%s); retrying in %.3g s", self.url, problem, reason, pause)
                self.hurry.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _moved(self) -> None:
        self.activity += 1
