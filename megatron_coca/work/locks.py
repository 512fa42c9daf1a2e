"""Locks between processes, also on several hosts. A lock ends when the process that holds it ends or is killed."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

Error = Callable[[str], Exception]
"""The class of the error to raise, or a function that returns the error. Its only argument is the message."""


class Busy(Exception):
    """Another process holds the lock, and the caller has something else to do."""


def lock_file(final: Path) -> Path:
    """Return the file to lock during the preparation of `final`."""
    return final.with_name(f".{final.name}.lock")


class HeldLock(NamedTuple):
    """A lock that this process holds: the path of its file, and the file's inode number when it was locked."""

    path: Path
    number: int | None

    def intact(self) -> bool:
        """Return whether the file at the path is still the locked one."""
        return _file_number(self.path) == self.number


def _file_number(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextmanager
def exclusive_lock(
    path: Path, error: Error, busy: str | Exception | None, temporary: bool = False
) -> Iterator[HeldLock]:
    """Lock a file inside the block, and create it if it is missing. The lock also ends when the process ends.

    If another file takes the place of this one, for example because the folder is deleted and created again, the lock
    protects nothing any more, and `HeldLock.intact` returns False.

    Args:
        busy: the message for `error`, or the exception, that is raised if another process holds the lock. With None,
            wait for the lock.
        temporary: whether to remove the file at the end of the block, before it is unlocked.

    Raises:
        error, or the exception `busy`: another process holds the lock.
        error: the file cannot be locked.
    """
    from filelock import FileLock, Timeout  # the GPT-NeoX plugin imports this module, but does not need filelock

    # With a timeout of 0, there would be no retry after another process has removed its temporary file, which this
    # process has already opened.
    lock = FileLock(path, timeout=-1 if busy is None else 0.1, poll_interval=0.05)
    try:
        lock.acquire()
    except Timeout:
        raise busy if isinstance(busy, Exception) else error(str(busy)) from None
    except (OSError, NotImplementedError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise error(f"{path}: cannot be locked ({reason}); it must be a regular file in a writable folder") from failure
    held = HeldLock(path, _file_number(path))
    try:
        yield held
    finally:
        if temporary and held.intact():
            path.unlink(missing_ok=True)
        lock.release()


def is_locked(lock: Path) -> bool:
    """Return whether a process holds a lock. This check holds the lock for a moment. A process that tries to lock the
    file at this moment retries for a longer time.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
