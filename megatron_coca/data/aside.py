"""Writing that is complete or absent: into a folder aside, flushed to the disk, then renamed."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_coca.data.errors import DataError


@contextmanager
def atomic_dir(final: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``final`` when the block ends well and is removed when it does not.

    Raises ``DataError`` where ``final`` exists, and for a disk that is full or read-only.
    """
    refuse_existing(final)
    aside: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
        aside.chmod(0o777 & ~_umask())
        yield aside
        complete(aside, final)
    except OSError as error:
        raise DataError(
            f"{final}: cannot be written ({error.strerror or error}). Nothing was left behind; free some space or "
            "choose another folder."
        ) from error
    finally:
        if aside is not None and aside.exists():
            shutil.rmtree(aside, ignore_errors=True)


def refuse_existing(final: Path) -> None:
    """Raise ``DataError`` where ``final`` exists: nothing is ever written into it."""
    if final.exists():
        raise DataError(f"{final}: exists already, and is left as it is. Remove it or choose another folder.")


def partial_folder(final: Path) -> Path:
    """Where work towards ``final`` goes on from, after a kill: always the same folder, beside it."""
    return final.parent / f".{final.name}.partial"


@contextmanager
def alone(final: Path) -> Iterator[None]:
    """Work towards ``final`` while no other process does, on this machine.

    The lock is a file beside ``final``, removed by its holder at the end, so whoever gets it looks whether it is still
    the one that can be found. Raises ``DataError`` where another process has it.
    """
    path = final.parent / f".{final.name}.lock"
    descriptor = _locked(path)
    if descriptor is None:
        raise DataError(f"{final}: another process is preparing it. Wait for it, or choose another folder.")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        os.close(descriptor)


def complete(folder: Path, final: Path) -> None:
    """Make a filled folder ``final``: its files flushed to the disk, then renamed."""
    for path in folder.rglob("*"):
        if path.is_file():
            _flush(path)
    folder.rename(final)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
