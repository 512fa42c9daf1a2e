"""Folders of repositories, as they are cloned or unpacked: one document per source file.

A path of the source holds repositories: ``name`` or ``owner/name``. A folder in it is a repository if it has ``.git`` or
any file of its own; if it has folders only, those are the repositories of an owner. A path with ``.git`` is itself one.
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.document import Document, Problems, RejectedRecord
from megatron_coca.data.readers.filters import Facts, admit, admit_facts, size_reason
from megatron_coca.data.readers.languages import language_of_path, language_of_script
from megatron_coca.data.readers.source import Chunk, Filters, SourceSpec, Unit
from megatron_coca.data.readers.trees import Walk, is_repository, outside, repositories, shown

CHUNK_BYTES, CHUNK_FILES = 1 << 20, 2000
_HEAD_BYTES = 8192


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
        DataError: a filter needs stars or licences and there is no metadata.
    """

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        needed = bool(spec.filters.min_stars or spec.filters.licences)
        if needed and spec.metadata is None:
            raise DataError(
                f"{spec.name}: filters by stars or licences need metadata: a JSONL file with the repositories."
            )
        if spec.metadata is not None and not Path(spec.metadata).is_file():
            raise DataError(f"{spec.metadata}: no such file. Correct the metadata of {spec.name}.")

    def units(self) -> list[Unit]:
        """One per repository. Their sizes would take a look at every file, and are not known."""
        return [Unit(path, 0) for root in self._spec.paths for path in self._roots(str(root))]

    def _roots(self, root: str) -> list[str]:
        if not os.path.isdir(root):
            raise DataError(f"{root}: no such folder. Check the path of {self._spec.name}.")
        try:
            return list(repositories(os.path.normpath(root)))
        except OSError as error:
            raise DataError(f"{root}: cannot be listed ({error.strerror}). Check its permissions.") from error

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """Names of about a megabyte of files. What else was met is sent along, to be counted."""
        walk, names, size, first = Walk(), list[str](), 0, 1
        repository = self._name(unit.path)
        if repository is None:
            yield Chunk(unit.path, 1, Files("", (), outside(unit.path), ()), 0)
            return
        for path, length in walk.files(unit.path):
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
        for root in map(os.path.normpath, map(str, self._spec.paths)):
            if path == root:
                return shown(os.path.basename(os.path.abspath(path))) if is_repository(path) else None
            if path.startswith(os.path.join(root, "")):
                return shown(os.path.relpath(path, root))
        raise DataError(f"{path}: not a repository of {self._spec.name}. Read the units that this reader gave.")

    def documents(self, chunk: Chunk, problems: Problems) -> Iterator[Document]:
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
                text = _read(os.path.join(chunk.path, name), facts, self._spec.filters)
            except RejectedRecord as fault:
                problems.add(shown(os.path.join(chunk.path, name)), fault.kind, fault.detail)
            except _Unwanted as unwanted:
                problems.leave_out(str(unwanted))
            else:
                yield Document(text, files.repository)

    @functools.cached_property
    def _metadata(self) -> dict[str, tuple[int | None, tuple[str, ...] | None]]:
        return {} if self._spec.metadata is None else _load_metadata(Path(self._spec.metadata))

    def __getstate__(self) -> dict[str, Any]:
        return {"_spec": self._spec}  # each process reads the metadata itself: it may be large


class _Unwanted(Exception):
    """A sound file that is not wanted, with the reason."""


def _refuse(reason: str | None) -> None:
    if reason:
        raise _Unwanted(reason)


def _read(path: str, facts: Facts, filters: Filters) -> str:
    """The text of a file that is wanted; else ``_Unwanted`` or ``RejectedRecord``. What can be told unread, is."""
    if facts.language is not None:
        _refuse(admit_facts(facts, filters))
    try:
        _refuse(size_reason(os.path.getsize(path), Filters(max_bytes=filters.max_bytes)))
        raw = _bytes(path, facts.language is None)
    except OSError as error:
        raise RejectedRecord("unreadable", error.strerror or str(error)) from error
    text = _decode(raw)
    if facts.language is None:
        facts = Facts(facts.stars, facts.licences, language_of_script(text), facts.path)
        _refuse(None if facts.language else "unknown file type")
    _refuse(None if text.strip() else "empty file")
    _refuse(admit(text, facts, filters))
    return text


def _bytes(path: str, unknown: bool) -> bytes:
    """All of a file; of one of unknown type, which may be any size, only the head unless it is a script."""
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES)
        _refuse("binary" if b"\0" in head else None)
        _refuse("unknown file type" if unknown and not head.startswith(b"#!") else None)
        return head + stream.read()


def _decode(raw: bytes) -> str:
    _refuse("binary" if b"\0" in raw else None)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RejectedRecord("invalid UTF-8", f"byte {error.start}") from error


def _load_metadata(path: Path) -> dict[str, tuple[int | None, tuple[str, ...] | None]]:
    """(stars, licences) by repository in lower case."""
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


def _stars(record: Mapping[str, Any]) -> int | None:
    return None if record.get("stars") is None else int(record["stars"])


def _licences(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    found = record.get("licence", record.get("license"))
    return (found,) if isinstance(found, str) else None if found is None else tuple(map(str, found))
