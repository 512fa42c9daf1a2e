"""Files and folders that are either complete or absent, even after a kill or a power loss, and locks between processes.

Content is written under a hidden name in the same folder, flushed to disk, and renamed.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

Error = Callable[[str], Exception]
"""The class of the error to raise, or a function that returns the error. Its only argument is the message."""


def write_file(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file atomically. Raises OSError on failure; an existing file is then unchanged.

    A FIFO or a device is never replaced. Without `durable` nothing is flushed to disk: the file is complete after a
    kill, but maybe not after a power loss.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # process numbers are equal in all pods
    try:
        with partial.open("xb") as file:  # "x" does not follow a planted symbolic link
            file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            flush(partial)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


def require_new(folder: Path, error: Error) -> None:
    """Raise `error` if `folder` exists."""
    if folder.exists():
        raise error(f"{folder}: exists already; name a new folder, or remove this one")


def partial_folder(final: Path) -> Path:
    """Return the hidden folder in which `final` is prepared. A preparation that resumes uses the same folder."""
    return final.with_name(f".{final.name}.partial")


def lock_file(final: Path) -> Path:
    """Return the file to lock during the preparation of `final`."""
    return final.with_name(f".{final.name}.lock")


@contextmanager
def atomic_dir(final: Path, error: Error) -> Iterator[Path]:
    """Yield a new folder to fill. At the end of the block it is renamed to `final`; after an exception it is removed.

    Raises:
        error: `final` exists, cannot be written, or another process is writing it.
    """
    require_new(final, error)
    partial = partial_folder(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        busy = f"{final}: another process is writing it; wait for it, or name another folder"
        with exclusive_lock(lock_file(final), error, busy, temporary=True):
            require_new(final, error)  # another process may have written the folder before the lock was acquired
            try:
                remove(partial)
                partial.mkdir()
                yield partial
                complete_folder(partial, final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{final}: cannot be written ({reason}); free some space or name another folder") from failure


def complete_folder(partial: Path, final: Path) -> None:
    """Flush a folder with all files in it to disk and rename it to `final`."""
    for path in (*partial.rglob("*"), partial):
        flush(path)
    partial.rename(final)
    flush(final.parent)


@contextmanager
def exclusive_lock(path: Path, error: Error, busy: str | None, temporary: bool = False) -> Iterator[None]:
    """Lock a file inside the block, and create it if it is missing. The lock also ends when the process ends.

    Args:
        busy: the message of `error` if another process holds the lock; None waits for the lock.
        temporary: whether to remove the file at the end of the block, before it is unlocked.

    Raises:
        error: another process holds the lock, or the file cannot be locked.
    """
    # Not 0: another process may remove its temporary file after this one has opened it, and then a retry is needed.
    lock = FileLock(path, timeout=-1 if busy is None else 0.1, poll_interval=0.05)
    try:
        lock.acquire()
    except Timeout:
        raise error(str(busy)) from None
    except (OSError, NotImplementedError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{path}: cannot be locked ({reason}); it must be a regular file in a writable folder") from failure
    try:
        yield
    finally:
        if temporary:
            path.unlink(missing_ok=True)
        lock.release()


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a symbolic link (not its target), if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
