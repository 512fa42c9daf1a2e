"""Folders on the disk that hold repositories: which there are, and their files in sorted order.

Links are not followed, so that nothing outside is read and nothing twice.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.languages import language_of_path

_VERSION_CONTROL = frozenset((".git", ".hg", ".svn", ".bzr", "CVS", "_darcs", ".jj"))


def shown(path: str) -> str:
    """A path as UTF-8 can spell it: file systems allow any bytes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def is_repository(folder: str) -> bool:
    """Whether a version control system knows the folder."""
    return any(entry.name in _VERSION_CONTROL for entry in _entries(folder))


def outside(root: str) -> Mapping[str, int]:
    """What lies in a folder of repositories beside them: reasons to leave it out, and numbers."""
    links = [entry.is_symlink() for entry in _entries(root) if not entry.is_dir(follow_symlinks=False)]
    return {"symbolic link": sum(links), "outside of a repository": len(links) - sum(links)}


def _folders(folder: str) -> list[str] | None:
    """Folders within, sorted; None for a repository."""
    entries = _entries(folder)
    if any(entry.name in _VERSION_CONTROL or not entry.is_dir(follow_symlinks=False) for entry in entries):
        return None
    return [entry.path for entry in entries] or None


def repositories(root: str) -> Iterator[str]:
    """Repositories in ``root``, sorted; first ``root`` itself, where something lies in it that belongs to none.

    Raises:
        DataError: there is no folder in it.
        OSError: it cannot be listed.
    """
    entries = _entries(root)
    if any(entry.name in _VERSION_CONTROL for entry in entries):
        yield root
        return
    folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    if not folders:
        raise DataError(f"{root}: holds no repository. Name the folder that they lie in; links are not followed.")
    if len(folders) < len(entries):
        yield root
    for folder in folders:
        try:
            yield from _folders(folder) or [folder]
        except OSError:
            yield folder  # reported where it is read


class Walk:
    """The files of a repository in sorted order, and what was met on the way."""

    def __init__(self) -> None:
        self.left_out: Counter[str] = Counter()
        self.unreadable: list[tuple[str, str]] = []

    def files(self, folder: str) -> Iterator[tuple[str, int, int]]:
        """(path, bytes, time of the last change in ns) of every file of a known or possible type."""
        waiting = [iter(self._list(folder))]
        while waiting:
            entry = next(waiting[-1], None)
            if entry is None:
                waiting.pop()
            elif entry.is_symlink():
                self.left_out["symbolic link"] += 1
            elif entry.is_dir(follow_symlinks=False):
                self._enter(entry, waiting)
            elif self._is_source(entry):
                yield entry.path, *self._size_and_time(entry)

    def drain(self) -> tuple[Mapping[str, int], tuple[tuple[str, str], ...]]:
        """What was met since the last call."""
        found = dict(self.left_out), tuple(self.unreadable)
        self.left_out.clear()
        self.unreadable.clear()
        return found

    def _list(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            return _entries(folder)
        except OSError as error:
            self.unreadable.append((folder, error.strerror or str(error)))
            return []

    def _enter(self, entry: os.DirEntry[str], waiting: list[Iterator[os.DirEntry[str]]]) -> None:
        if entry.name in _VERSION_CONTROL:
            self.left_out["version control"] += 1
        else:
            waiting.append(iter(self._list(entry.path)))

    def _is_source(self, entry: os.DirEntry[str]) -> bool:
        regular = entry.is_file(follow_symlinks=False)
        if regular and (language_of_path(entry.name) or "." not in entry.name[1:]):
            return True
        self.left_out["unknown file type" if regular else "not a regular file"] += 1
        return False

    def _size_and_time(self, entry: os.DirEntry[str]) -> tuple[int, int]:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return 0, 0  # reported where it is read
        return status.st_size, status.st_mtime_ns


def fingerprint(repository: str) -> tuple[int, str]:
    """(bytes, stamp) of the files that a walk through a repository gives; another stamp when one of them changed."""
    walk, total, digest = Walk(), 0, hashlib.blake2b(digest_size=16)
    for path, size, changed in walk.files(repository):
        total += size
        digest.update(os.fsencode(f"{path}\0{size} {changed}\0"))
    digest.update(repr(walk.unreadable).encode("utf-8", "backslashreplace"))
    return total, digest.hexdigest()
