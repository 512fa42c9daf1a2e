"""The results of units of work. A result is a folder that is either complete or absent, even if a process is killed or
the power fails.

The content is written to a hidden folder beside the final one, under a lock. Then the hidden folder is flushed to disk
and renamed.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_coca.support.atomic_write import flush, remove
from megatron_coca.support.errors import why_not_written
from megatron_coca.support.regular_files import read_regular
from megatron_coca.work.locks import Busy, Error, exclusive_lock, lock_file


def require_new(folder: Path, error: Error) -> None:
    """Raise `error` if `folder` exists."""
    if folder.exists():
        raise error(f"{folder}: exists already; name a new folder, or remove this one")


def is_complete(folder: Path, files: Mapping[str, bytes], error: Error) -> bool:
    """Return whether an earlier process has written `folder` with these files; False if there is no such folder.

    A scheduler often restarts a command that was killed after its folder was complete. With this check, the restarted
    command succeeds.

    Raises `error` if the folder exists and one of the files is missing or differs.
    """
    if not folder.exists():
        return False
    for name, content in files.items():
        try:
            same = read_regular(folder / name, len(content)) == content
        except OSError:
            same = False
        if not same:
            require_new(folder, error)
    return True


def partial_folder(final: Path) -> Path:
    """Return the hidden folder in which `final` is prepared. A preparation that resumes uses the same folder."""
    return final.with_name(f".{final.name}.partial")


def make_once(final: Path, make: Callable[[Path], None], error: Error, wait: bool = False) -> bool:
    """Make the folder `final` unless it exists. `make` fills a new folder, which is then renamed to `final`.

    Return False if another process is making the folder. With `wait`, wait for that process instead, and make the
    folder if that process did not.

    Raises:
        error: the folder cannot be locked.
        OSError: the folder cannot be written.
    """
    if final.is_dir():
        return True
    try:
        with _locked_scratch(final, error, None if wait else Busy()) as partial:
            if not final.is_dir():
                make(partial)
                complete_folder(partial, final)
    except Busy:
        return False
    return True


@contextmanager
def atomic_dir(final: Path, error: Error) -> Iterator[Path]:
    """Yield a new folder to fill. At the end of the block it is renamed to `final`; after an exception it is removed.

    Raises:
        error: `final` exists, cannot be written, or another process is writing it.
    """
    require_new(final, error)
    with scratch_dir(final, error) as partial:
        require_new(final, error)  # another process may have written the folder before the lock was acquired
        yield partial
        complete_folder(partial, final)


@contextmanager
def scratch_dir(final: Path, error: Error) -> Iterator[Path]:
    """Yield an empty folder beside `final`; `final` may exist. The new folder is removed at the end of the block, if it
    still exists. If this process is killed, the next process with the same `final` removes the new folder.

    Raises:
        error: the folder cannot be written, or another process uses it.
    """
    busy = f"{final}: another process is writing it; wait for it, or name another folder"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked_scratch(final, error, busy) as partial:
            yield partial
    except OSError as failure:
        raise error(f"{final}: {why_not_written(failure, 'name another folder')}") from failure


@contextmanager
def _locked_scratch(final: Path, error: Error, busy: str | Exception | None) -> Iterator[Path]:
    partial = partial_folder(final)
    with exclusive_lock(lock_file(final), error, busy, temporary=True):
        try:
            remove(partial)  # left by a killed process
            partial.mkdir()
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def complete_folder(partial: Path, final: Path) -> None:
    """Flush a folder with all files in it to disk and rename it to `final`."""
    for path in (*partial.rglob("*"), partial):
        flush(path)
    partial.rename(final)
    flush(final.parent)
