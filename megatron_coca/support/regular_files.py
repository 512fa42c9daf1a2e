"""Open only regular files. A FIFO, a device or a loop of links raises an error, so it cannot hang the program."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

LARGEST = 1 << 28
"""Largest size in bytes of a file that is read as a whole, such as JSON or a vocabulary."""


def open_regular(path: str | Path, limit: int | None = None) -> BinaryIO:
    """Open a file for reading. Raises OSError, including for files that are not regular or exceed `limit` bytes."""
    path = Path(path)
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for its writer
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if limit is not None and status.st_size > limit:
        raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {limit:,}", str(path))
    return path.open("rb")


def read_regular(path: str | Path, limit: int = LARGEST) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises OSError like `open_regular`."""
    with open_regular(path, limit) as file:
        return file.read(limit)


COPY = "replace it with a copy if that file may be published"


def inside(folder: str | Path, name: str, error: Callable[[str], Exception], remedy: str = COPY) -> Path:
    """Return the path of a file or folder in a folder that may come from somebody else.

    Raises `error`, with the `remedy`, if `name` or a link in its place leads out of the folder, because a private file
    could then be published or overwritten. In the cache of the Hugging Face Hub, links lead to the folder `blobs`
    beside `snapshots`.
    """
    path = Path(folder, name)
    own, found = (
        Path(os.path.realpath(each)) for each in (folder, path)
    )  # unlike resolve, realpath raises no error for a loop of links
    cached = (each.parents[1] for each in (own, *own.parents) if each.parent.name == "snapshots")
    blobs = [repository / "blobs" for repository in cached if "--" in repository.name]  # models--OWNER--NAME
    if not any(found.is_relative_to(allowed) for allowed in (own, *blobs)):
        what = "a link to" if path.is_symlink() else "leads to"
        raise error(f"{path}: {what} {found}, which is outside the folder; {remedy}")
    return path


def open_to_append(path: Path) -> BinaryIO:
    """Open an existing or new file to append to it.

    Raises OSError for a link: a downloaded folder may contain a link to one of the user's other files.
    """
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
