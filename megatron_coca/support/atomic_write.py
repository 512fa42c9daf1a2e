"""Write files that are either complete or absent, even if the process is killed or the power fails.

Content is written under a hidden name in the same folder, flushed to disk, and renamed.
"""

import errno
import fcntl
import os
import secrets
import shutil
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Write a file atomically. Raises OSError on failure; an existing file is then unchanged.

    A FIFO or a device is never replaced. Without `durable` nothing is flushed to disk. The file is then complete if the
    process is killed, but maybe not if the power fails.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    _remove_leftovers(path)
    file = _new_partial(path)
    partial = Path(file.name)
    try:
        with file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            partial.rename(path)  # before the file is closed, because closing ends its lock
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


_swept = set[Path]()
"""Files for which this process has removed the partial files of killed processes."""


def _new_partial(path: Path) -> BinaryIO:
    """Open a new hidden file to write the content of `path`, and lock it, so that no other process removes it."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")  # pods can have equal process ids
        file = partial.open("xb")  # "x" does not follow a planted symbolic link
        if _lock(file) is not False and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process has locked or removed it as a leftover


def _remove_leftovers(path: Path) -> None:
    """Remove the partial files of `path` that killed processes have left. No process has locked such a file."""
    if (named := path.absolute()) in _swept:
        return
    _swept.add(named)
    for leftover in path.parent.glob(f".{escape(path.name)}.{'[0-9a-f]' * 16}.partial"):
        with (
            suppress(OSError),
            open(leftover, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file,
        ):
            if _lock(file):
                leftover.unlink()


def _lock(file: BinaryIO) -> bool | None:
    """Lock an open file, and return whether this succeeds; None if the file system has no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


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
