"""The reader for folders of cloned or unpacked repositories. Every source file is one document.

Each path of the source is either a single repository, which contains `.git`, or a folder of repositories with the paths
`name` or `owner/name`. In a folder of repositories, a subfolder that contains `.git` or any file is a repository. A
subfolder that contains only folders is an owner, and these folders are the repositories of the owner.
"""

import difflib
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.fields import (
    LANGUAGES,
    Facts,
    admit,
    admit_facts,
    language_of_path,
    language_of_script,
    size_reason,
)
from megatron_coca.data.readers.source import (
    Chunk,
    Document,
    Filters,
    LeftOut,
    Reader,
    ReadingProblems,
    ReadUnit,
    RejectedRecord,
    SourceSpec,
    printable,
)
from megatron_coca.data.readers.streams import BYTE_ORDER_MARK, decode

CHUNK_BYTES, CHUNK_FILES = 1 << 20, 2000
_HEAD_BYTES = 8192
_VERSION_CONTROL = frozenset((".git", ".hg", ".svn", ".bzr", "CVS", "_darcs", ".jj"))


@dataclass(frozen=True, slots=True)
class RepositoryFiles:
    """The payload of a chunk of a repository.

    Attributes:
        repository: "name" or "owner/name".
        names: paths of the files, relative to the repository.
        left_out: number of skipped entries by reason.
    """

    repository: str
    names: tuple[str, ...]
    left_out: Mapping[str, int]


class RepositoryReader(Reader):
    """Reads the source files in folders of repositories.

    The key of a document is its repository, so that each repository is in a single split. The number of stars is looked
    up in `spec.metadata` by the repository's name (case-insensitive). Raises `DataError` if a filter needs stars but
    there is no metadata, or if a filter names an unknown language.
    """

    uses = frozenset(("metadata",))

    def __init__(self, spec: SourceSpec) -> None:
        known = {language.lower() for language in LANGUAGES}
        for name in spec.filters.languages:
            if name.lower() not in known:
                near = difflib.get_close_matches(name, LANGUAGES, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"supported languages: {', '.join(sorted(LANGUAGES))}"
                raise DataError(f"{spec.name}: filters.languages: unknown language {name!r}; {hint}")
        if spec.filters.min_stars and spec.metadata is None:
            raise DataError(
                f"{spec.name}: the filter min_stars needs metadata; set metadata to a JSONL file with the stars of "
                "the repositories"
            )
        if spec.metadata is not None and not Path(spec.metadata).is_file():
            raise DataError(f"{spec.metadata}: no such file; correct the key metadata of {spec.name}")
        self._spec = spec

    def units(self) -> list[ReadUnit]:
        """List the repositories. The stamp of a repository is a digest of the metadata and of the names, sizes and
        modification times of the repository's source files.

        Raises `DataError` for a path that is not a folder or contains no repository. Listing a million files takes
        about 3 s if the folders are in the page cache.
        """
        units, metadata = [], self._metadata_digest()
        for root in map(str, self._spec.paths):
            if not os.path.isdir(root):
                raise DataError(f"{root}: no such folder; check the path of {self._spec.name}")
            units += [_unit(path, metadata) for path in _repositories(os.path.normpath(root))]
        return units

    def stamp(self, unit: ReadUnit) -> str:
        return _unit(unit.path, self._metadata_digest()).stamp

    def _metadata_digest(self) -> str:
        if self._spec.metadata is None:
            return ""
        try:
            with Path(self._spec.metadata).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(
                f"{self._spec.metadata}: cannot be read ({error}); check the path and the permissions"
            ) from error

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Yield chunks. Each chunk contains the names of files that have about a megabyte together, and the counts of
        skipped entries.
        """
        repository = self._name(unit.path)
        names, left_out, size, first = list[str](), Counter[str](), 0, 1

        def chunk() -> Chunk:
            return Chunk(unit.path, first, RepositoryFiles(repository, tuple(names), dict(left_out)), size)

        for path, length, _ in _source_files(unit.path, left_out):
            names.append(path[len(unit.path) + 1 :])
            size += length
            if size >= CHUNK_BYTES or len(names) >= CHUNK_FILES:
                yield chunk()
                first, size = first + len(names), 0
                names.clear()
                left_out.clear()
        if names or left_out:
            yield chunk()

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """Yield one document for each file in a known language.

        Files are left out as "binary", "empty file" or "unknown file type", or because of the filters. The kinds of
        faults are "unreadable", "invalid UTF-8" and "record too long".
        """
        files: RepositoryFiles = chunk.payload
        for reason, count in files.left_out.items():
            problems.leave_out(reason, count)
        known = self._metadata.get(files.repository.lower(), Facts())
        for name in files.names:
            path = os.path.join(chunk.path, name)
            facts = replace(known, language=language_of_path(name), path=printable(name))
            size = _size(path)
            problems.read += size
            try:
                text = _read(path, size, facts, self._spec)
            except RejectedRecord as fault:
                problems.add(path, fault.kind, fault.detail, size)
            except LeftOut as left_out:
                problems.leave_out(left_out.reason)
            else:
                yield Document(text, files.repository, place=path)

    def _name(self, path: str) -> str:
        """Return the name of the repository at `path`."""
        if path in self._roots:
            return printable(os.path.basename(os.path.abspath(path)))
        owner = os.path.dirname(path)
        for root in (owner, os.path.dirname(owner)):
            if root in self._roots:
                return printable(os.path.relpath(path, root))
        raise DataError(f"{path}: not a repository of {self._spec.name}; pass a unit that `units` returned")

    @functools.cached_property
    def _roots(self) -> frozenset[str]:
        return frozenset(os.path.normpath(path) for path in self._spec.paths)

    @functools.cached_property
    def _metadata(self) -> dict[str, Facts]:
        return {} if self._spec.metadata is None else _load_metadata(Path(self._spec.metadata))

    def __getstate__(self) -> dict[str, Any]:
        return {"_spec": self._spec}  # the metadata may be large, so each process reads it from the file


def _load_metadata(path: Path) -> dict[str, Facts]:
    """Load the metadata. The keys of the result are the names of the repositories in lower case."""
    metadata = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line) if line.strip() else None
                if record is None:
                    continue
                stars = record.get("stars")
                metadata[record["repository"].lower()] = Facts(None if stars is None else int(stars))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise DataError(
                    f'{path}:{number}: invalid line ({error!r}); write it as {{"repository": "owner/name", "stars": 3}}'
                ) from error
    return metadata


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"{printable(folder)}: the folder cannot be listed ({error.strerror}); check the permissions"
        ) from error


def _repositories(root: str) -> Iterator[str]:
    """Yield the repositories in `root` in sorted order, or only `root` if it is itself a repository. Raises `DataError`
    if there is no repository.
    """
    entries = _entries(root)
    if any(entry.name in _VERSION_CONTROL for entry in entries):
        yield root
        return
    folders = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    if not folders:
        raise DataError(
            f"{root}: contains no repository; give the folder that contains the repositories (links are not followed)"
        )
    for folder in folders:
        inner = _entries(folder)
        is_owner = all(e.name not in _VERSION_CONTROL and e.is_dir(follow_symlinks=False) for e in inner)
        yield from [entry.path for entry in inner] if inner and is_owner else [folder]


def _source_files(repository: str, left_out: Counter[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (path, size in bytes, modification time in ns) for each file that may be source code, in sorted order.

    Skipped entries are counted in `left_out` by reason.
    """
    # A stack instead of recursion, because folders may be nested deeper than Python's recursion limit.
    stack = _entries(repository)[::-1]
    while stack:
        entry = stack.pop()
        if entry.is_symlink():
            left_out["symbolic link"] += 1
        elif entry.is_dir(follow_symlinks=False):
            if entry.name in _VERSION_CONTROL:
                left_out["version control"] += 1
            else:
                stack += _entries(entry.path)[::-1]
        elif not entry.is_file(follow_symlinks=False):
            left_out["not a regular file"] += 1
        elif language_of_path(entry.name) is None and "." in entry.name[1:]:
            left_out["unknown file type"] += 1
        else:
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                yield entry.path, 0, 0  # the error is reported when the file is read
            else:
                yield entry.path, status.st_size, status.st_mtime_ns


def _unit(repository: str, metadata: str) -> ReadUnit:
    size, stamp = _fingerprint(repository)
    return ReadUnit(repository, size, hashlib.sha256(f"{stamp} {metadata}".encode()).hexdigest()[:32])


def _fingerprint(repository: str) -> tuple[int, str]:
    """Return (total size in bytes, stamp) of the source files. The stamp changes if any of the files changes."""
    total, digest = 0, hashlib.blake2b(digest_size=16)
    for path, size, changed in _source_files(repository, Counter()):
        total += size
        digest.update(os.fsencode(f"{path}\0{size} {changed}\0"))
    return total, digest.hexdigest()


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0  # the error is reported when the file is read


def _read(path: str, size: int, facts: Facts, spec: SourceSpec) -> str:
    """Return the text of a file of `size` bytes. Raises `RejectedRecord` for a fault, and `LeftOut` for a file that is
    left out. If possible, the file is left out before it is read.
    """
    if facts.language and (reason := admit_facts(facts, spec.filters)):
        raise LeftOut(reason)
    try:
        if reason := size_reason(size, Filters(max_bytes=spec.filters.max_bytes)):
            raise LeftOut(reason)
        with open(path, "rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if b"\0" in head:
                raise LeftOut("binary")
            if facts.language is None and not head.startswith(b"#!"):
                raise LeftOut("unknown file type")
            raw = head + stream.read(spec.max_record + 1 - len(head))
    except OSError as error:
        raise RejectedRecord("unreadable", error.strerror or str(error)) from error
    if len(raw) > spec.max_record:
        raise RejectedRecord("record too long", f"more than max_record_mib: {spec.max_record_mib}")
    if b"\0" in raw:
        raise LeftOut("binary")
    text = decode(raw.removeprefix(BYTE_ORDER_MARK))
    if facts.language is None:
        facts = replace(facts, language=language_of_script(text))
        if facts.language is None:
            raise LeftOut("unknown file type")
    if not text.strip():
        raise LeftOut("empty file")
    if reason := admit(text, facts, spec.filters):
        raise LeftOut(reason)
    return text
