"""Folders of repositories, as they are cloned or unpacked: one document per source file.

A path of the source holds repositories: ``name`` or ``owner/name``. A folder in it is a repository if it has ``.git`` or
any file of its own; if it has folders only, those are the repositories of an owner. A path with ``.git`` is itself one.
"""

import difflib
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError, OutOfMemory
from megatron_coca.data.readers.fields import Facts, admit, admit_facts, size_reason
from megatron_coca.data.readers.languages import LANGUAGES, language_of_path, language_of_script
from megatron_coca.data.readers.source import (
    Chunk,
    Document,
    Filters,
    ReadingProblems,
    ReadUnit,
    RejectedRecord,
    SourceSpec,
    check_keys,
)

Known = tuple[int | None, tuple[str, ...] | None]
"""(stars, licences); None where the file does not say."""


def load_metadata(path: Path) -> dict[str, Known]:
    """Stars and licences by repository, in lower case. ``DataError`` for a line that is no such record."""
    known = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.strip() else None
                if record is not None:
                    known[record["repository"].lower()] = _stars(record), _licences(record)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DataError(
                    f'{path}:{number}: needs {{"repository": "owner/name", "stars": 3, "licence": "MIT"}} ({error!r}).'
                ) from error
    return known


def digest(path: Path) -> str:
    """SHA-256 of the file. ``DataError`` where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the path and its permissions.") from error


def _stars(record: Mapping[str, Any]) -> int | None:
    return None if record.get("stars") is None else int(record["stars"])


def _licences(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    found = record.get("licence", record.get("license"))
    return (found,) if isinstance(found, str) else None if found is None else tuple(map(str, found))


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


CHUNK_BYTES, CHUNK_FILES = 1 << 20, 2000
_HEAD_BYTES = 8192


def _check_languages(spec: SourceSpec) -> None:
    """A name that is no language would leave everything out."""
    known = {language.lower() for language in LANGUAGES}
    for name in spec.filters.languages:
        if name.lower() not in known:
            near = difflib.get_close_matches(name, LANGUAGES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(LANGUAGES))}."
            raise DataError(f"{spec.name}: filters.languages: {name!r} is no language that files are told by; {hint}")


@dataclass(frozen=True, slots=True)
class Files:
    """What a chunk holds.

    Attributes:
        repository: "name" or "owner/name".
        names: of the files, relative to the repository.
        left_out: reasons and numbers of what was passed over on the way.
        unreadable: folders that could not be listed, and why.
    """

    repository: str
    names: tuple[str, ...]
    left_out: Mapping[str, int]
    unreadable: tuple[tuple[str, str], ...]


class RepositoryReader:
    """Reads folders of repositories.

    The key of a document is its repository, so that no repository is on both sides of a split. Stars and licences come
    from ``spec.metadata``, found by the name of the repository without regard to case.

    Raises:
        DataError: a filter needs stars or licences and there is no metadata, or ``spec`` has keys that mean nothing
            here.
    """

    def __init__(self, spec: SourceSpec) -> None:
        check_keys(spec, "repositories")
        _check_languages(spec)
        self._spec = spec
        needed = bool(spec.filters.min_stars or spec.filters.licences)
        if needed and spec.metadata is None:
            raise DataError(
                f"{spec.name}: filters by stars or licences need metadata: a JSONL file with the repositories."
            )
        if spec.metadata is not None and not Path(spec.metadata).is_file():
            raise DataError(f"{spec.metadata}: no such file. Correct the metadata of {spec.name}.")

    def units(self) -> list[ReadUnit]:
        """One per repository. Its stamp tells names, sizes and times of its source files, and the metadata.

        ``DataError`` for a path that is no folder, or holds no repository. A million files take about 3 s where the
        page cache has their folders.
        """
        known = digest(Path(self._spec.metadata)) if self._spec.metadata is not None else ""
        return [self._unit(path, known) for root in self._spec.paths for path in self._found(str(root))]

    def _unit(self, path: str, known: str) -> ReadUnit:
        repository = self._name(path) is not None
        size, stamp = fingerprint(path) if repository else (0, repr(sorted(outside(path).items())))
        return ReadUnit(path, size, hashlib.sha256(f"{stamp} {known}".encode()).hexdigest()[:32])

    def unread(self) -> Counter[str]:
        """None: what is passed over in folders of repositories is counted with their chunks."""
        return Counter()

    def _found(self, root: str) -> list[str]:
        if not os.path.isdir(root):
            raise DataError(f"{root}: no such folder. Check the path of {self._spec.name}.")
        try:
            return list(repositories(os.path.normpath(root)))
        except OSError as error:
            raise DataError(f"{root}: cannot be listed ({error.strerror}). Check its permissions.") from error

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Names of about a megabyte of files. What else was met is sent along, to be counted."""
        walk, names, size, first = Walk(), list[str](), 0, 1
        repository = self._name(unit.path)
        if repository is None:
            yield Chunk(unit.path, 1, Files("", (), outside(unit.path), ()), 0)
            return
        for path, length, _ in walk.files(unit.path):
            names.append(path[len(unit.path) + 1 :])
            size += length
            if size >= CHUNK_BYTES or len(names) >= CHUNK_FILES:
                yield Chunk(unit.path, first, Files(repository, tuple(names), *walk.drain()), size)
                first, size = first + len(names), 0
                names.clear()
        if names or walk.left_out or walk.unreadable:
            yield Chunk(unit.path, first, Files(repository, tuple(names), *walk.drain()), size)

    def _name(self, path: str) -> str | None:
        """Name of the repository at ``path``; None for a folder of repositories."""
        if path in self._roots:
            return shown(os.path.basename(os.path.abspath(path))) if is_repository(path) else None
        owner = os.path.dirname(path)
        for root in (owner, os.path.dirname(owner)):
            if root in self._roots:
                return shown(os.path.relpath(path, root))
        raise DataError(f"{path}: not a repository of {self._spec.name}. Read the units that this reader gave.")

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """One document per file of a known language.

        Left out: "binary", "empty file", "unknown file type", and what the filters say. Faults: "unreadable",
        "invalid UTF-8".
        """
        files: Files = chunk.payload
        for reason, count in files.left_out.items():
            problems.leave_out(reason, count)
        for folder, why in files.unreadable:
            problems.add(shown(folder), "unreadable", why)
        stars, licences = self._metadata.get(files.repository.lower(), (None, None))
        for name in files.names:
            facts = Facts(stars, licences, language_of_path(name), shown(name))
            try:
                text = _read(os.path.join(chunk.path, name), facts, self._spec)
            except RejectedRecord as fault:
                problems.add(shown(os.path.join(chunk.path, name)), fault.kind, fault.detail)
            except _Unwanted as unwanted:
                problems.leave_out(str(unwanted))
            else:
                yield Document(text, files.repository)

    @functools.cached_property
    def _roots(self) -> frozenset[str]:
        return frozenset(os.path.normpath(path) for path in self._spec.paths)

    @functools.cached_property
    def _metadata(self) -> dict[str, Known]:
        return {} if self._spec.metadata is None else load_metadata(Path(self._spec.metadata))

    def __getstate__(self) -> dict[str, Any]:
        return {"_spec": self._spec}  # each process reads the metadata itself: it may be large


class _Unwanted(Exception):
    """A sound file that is not wanted, with the reason."""


def _refuse(reason: str | None) -> None:
    if reason:
        raise _Unwanted(reason)


def _read(path: str, facts: Facts, spec: SourceSpec) -> str:
    """The text of a file that is wanted; else ``_Unwanted`` or ``RejectedRecord``. What can be told unread, is."""
    filters = spec.filters
    if facts.language is not None:
        _refuse(admit_facts(facts, filters))
    try:
        _refuse(size_reason(os.path.getsize(path), Filters(max_bytes=filters.max_bytes)))
        raw = _bytes(path, facts.language is None, spec.max_record)
    except OSError as error:
        raise RejectedRecord("unreadable", error.strerror or str(error)) from error
    except MemoryError as error:
        raise OutOfMemory(shown(path)) from error
    text = _decode(raw)
    if facts.language is None:
        facts = Facts(facts.stars, facts.licences, language_of_script(text), facts.path)
        _refuse(None if facts.language else "unknown file type")
    _refuse(None if text.strip() else "empty file")
    _refuse(admit(text, facts, filters))
    return text


def _bytes(path: str, unknown: bool, limit: int) -> bytes:
    """All of a file; of one of unknown type, which may be any size, only the head unless it is a script."""
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
        _refuse("binary" if b"\0" in head else None)
        _refuse("unknown file type" if unknown and not head.startswith(b"#!") else None)
        raw = head + stream.read(limit + 1 - len(head))
    if len(raw) > limit:
        raise RejectedRecord("record too long", f"more than max_record_mib: {limit >> 20}")
    return raw


def _decode(raw: bytes) -> str:
    _refuse("binary" if b"\0" in raw else None)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error
