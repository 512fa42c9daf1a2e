"""Files on object stores, through fsspec: S3, Google Cloud Storage and all other file systems that it supports.

Endpoints, credentials and other options are configured in fsspec and in the library of the store.
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
from megatron_coca.support.plain_text import masked, password

logger = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT = 20.0
"""Seconds during which commands that only read retry a failed transfer."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the first retry of a transfer, and the longest pause. The pause doubles with every retry."""
PERMANENT_NUMBERS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Numbers of errors of the store or the local disk that a retry cannot fix."""
PERMANENT_CLASSES = {"FileNotFoundError", "PermissionError", "NotImplementedError", "NoCredentialsError"}
"""Names of the classes of errors that a retry cannot fix, for libraries that set no error number."""
TRANSFERS = 8
"""Number of concurrent transfers."""
WITH_FOLDERS = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "webdav"})
"""Protocols of stores that can contain empty folders."""
SCHEMES = frozenset(
    {
        *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "hf", "http", "https"),
        *("sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "webdav", "dropbox", "gdrive", "file", "local", "memory"),
    }
)
"""Schemes of addresses that are read and written. Other schemes of fsspec, such as reference:// and zip://, read
further files and addresses that the content of a file names.
"""
HUB = "hf://"
"""Prefix of a name on the Hugging Face hub."""


def hub_hint(path: str | Path, bare: bool = False) -> str:
    """Return a hint if a missing folder has a name like those on the Hugging Face hub, else an empty string.

    With `bare`, the name may lack its owner, as in gpt2. There is no hint for a path in an existing folder or in runs/
    and models/, because those are local folders.
    """
    if bare and re.fullmatch(r"\w[\w.-]*", str(path)):
        return f"; for a model on the Hugging Face hub, give its whole name, {HUB}OWNER/{path}"
    local = Path(path).parts[:1] in (("runs",), ("models",)) or Path(path).parent.is_dir()
    if local or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        return ""
    return (
        f"; for a model on the Hugging Face hub, run `megatron-coca download {path}` and use "
        f"models/{Path(path).name}, or name it {HUB}{path}"
    )


def is_url(path: str | Path) -> bool:
    """Return True if `path` is a URL of an object store (s3://, gs://, memory://, ...)."""
    return "://" in str(path)


def not_read(addresses: Sequence[str], remedy: str) -> str:
    """Return the message about addresses in a file that may come from somebody else."""
    listed = ", ".join(masked(address)[:80] for address in addresses[:3])
    return (
        f"{listed}: not read, because the file with this address may be untrusted; if you trust the address, {remedy}"
    )


def local_folder(url: str, cache: str | Path, error: type[InputError]) -> Path:
    """Return the folder in `cache` for files from `url`: CACHE/s3/a/b for s3://a/b."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise error(f"{url}: not the URL of a folder; write, for example, s3://bucket/runs/coca")
    parts[0] = re.sub(r":.*@", "@", parts[0])  # the folder's name must not contain a password
    return Path(cache, scheme, *parts)


class UnavailableError(InputError):
    """An object store does not answer. The input is valid: the same command works when the store is available again."""

    status = UNAVAILABLE


class RemoteFiles:
    """The objects below a URL. Names are relative to the URL.

    A failed transfer is retried until it succeeds. If `timeout` seconds have passed since its first failure, or if
    `hurry` is set, `unavailable` is raised. A permanent error, such as a missing permission, is raised at once as
    `permanent`.

    Attributes:
        hurry: an event that makes the next failure final.
        activity: a counter that increases with every attempt and while bytes are transferred.
    """

    permanent: type[InputError] = InputError
    unavailable: type[InputError] = UnavailableError

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        """Open the file system.

        Raises `permanent` if the scheme of `url` is not in `SCHEMES`, or if no installed library supports it.
        """
        import fsspec
        from fsspec.callbacks import Callback

        self.url, self._timeout = url.rstrip("/"), timeout
        self.hurry, self.activity = threading.Event(), 0
        self._progress = Callback(hooks={"activity": lambda *_, **__: self._moved()})
        if "::" in self.url or self.url.partition("://")[0] not in SCHEMES:
            raise self.permanent(
                f"{url}: this kind of address cannot be opened; name a file or folder with one of the schemes "
                f"{', '.join(sorted(SCHEMES))}, without `::`"
            )
        # The local file system of fsspec creates a file's folders only on request.
        options = {"auto_mkdir": True} if self.url.partition("://")[0] in ("file", "local") else {}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **options)
        except (ImportError, ValueError, OSError) as error:
            raise self.permanent(
                f"{url}: cannot be opened ({error}); check the address and the network; s3:// needs the package s3fs, "
                "gs:// needs gcsfs"
            ) from error

    def names(self, root: str = "") -> list[str]:
        """Return the names of all objects in the folder `root`, relative to it. A missing folder has none."""
        folder = f"{self._root}/{root}".rstrip("/")

        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return self._fs.find(folder)
            except FileNotFoundError:
                return []

        return [path.removeprefix(folder).lstrip("/") for path in self._attempt("cannot be listed", find)]

    def matches(self, pattern: str) -> list[str]:
        """Return the sorted names that match a pattern with `*`, `?` or `[`."""
        found = self._attempt("cannot be listed", lambda: self._fs.glob(f"{self._root}/{pattern}"))
        return sorted(path.removeprefix(f"{self._root}/") for path in found)

    def facts(self, name: str) -> tuple[int, str] | None:
        """Return the size of an object and a tag that changes with its content; None if there is no such object."""

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
        """Return the content of an object, or its bytes from `start` to `end`."""
        content: bytes = self._attempt(
            f"{name} cannot be read", lambda: self._fs.cat_file(self._path(name), start=start, end=end)
        )
        return content

    def read_ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return several byte ranges of an object, which are requested at the same time."""
        paths = [self._path(name)] * len(starts)

        def ranges() -> list[bytes]:
            return list(self._fs.cat_ranges(paths, list(starts), list(ends), on_error="raise"))

        return self._attempt(f"{name} cannot be read", ranges)

    def put(self, source: Path, name: str) -> None:
        """Upload a file, and check that the object has the same size."""
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
        """Remove an object if it exists."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                logger.debug("%s: %s was already removed", self.url, name)

        self._attempt(f"{name} cannot be removed", remove)

    def remove_folders(self, root: str) -> None:
        """Remove the folder `root` and all folders in it if they are empty. Object stores have no folders."""
        kinds = self._fs.protocol
        if WITH_FOLDERS.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
            return
        folder = self._path(root)
        try:
            for path in sorted([folder, *self._fs.find(folder, withdirs=True)], key=len, reverse=True):
                self._fs.rmdir(path)
        except OSError as error:
            logger.debug("%s: %s is kept (%s)", self.url, root, error)

    def each(self, names: Iterable[str], transfer: Callable[[str], Any]) -> None:
        """Call `transfer` for every name concurrently. Raises the first error after all calls have ended."""
        with ThreadPoolExecutor(TRANSFERS) as pool:
            for _ in pool.map(transfer, list(names)):
                pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _attempt(self, problem: str, action: Callable[[], T]) -> T:
        """Return the result of `action`, which is retried while the store does not answer.

        Raises:
            unavailable: the store did not answer for the timeout.
            permanent: a permanent error of the store, or the local disk is full or read-only.
        """
        pause, first_failure = FIRST_PAUSE, None
        while True:
            self._moved()
            try:
                return action()
            except Exception as error:  # each store's library has its own exception classes
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                reason = reason if (secret := password(self.url)) is None else reason.replace(secret, "***")
                if getattr(error, "errno", None) in PERMANENT_NUMBERS or type(error).__name__ in PERMANENT_CLASSES:
                    raise self.permanent(f"{self.url}: {problem} ({reason})") from error
                now = time.monotonic()
                first_failure = now if first_failure is None else first_failure
                left = first_failure + self._timeout - now
                if left <= 0 or self.hurry.is_set():
                    since = f"for {now - first_failure:.0f} s" if first_failure < now else "now"
                    raise self.unavailable(f"{self.url}: {problem} {since} ({reason})") from error
                pause = min(pause, left)
                logger.warning("%s: %s (%s); retrying in %.3g s", self.url, problem, reason, pause)
                self.hurry.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _moved(self) -> None:
        self.activity += 1
