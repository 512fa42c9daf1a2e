"""Types that all readers share: sources, units, chunks, documents and counts of problems."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field

from megatron_coca.data.errors import DataError
from megatron_coca.support.plain_text import plain

NAMED_PROBLEMS = 1000  # bounds the memory for a corpus of bad lines


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        text: the text to tokenize.
        key: documents with the same key are in the same split.
        part: name of the set within its source, if sets are selected or divided; else empty.
    """

    text: str
    key: str
    part: str = ""


class RejectedRecord(Exception):
    """A record is unusable. Faults are counted by `kind`; `detail` is only shown."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class LeftOut(Exception):
    """A valid record is not wanted, for this `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ReadingProblems:
    """Counts of records that did not become documents.

    Faults are counted by kind, and the first `NAMED_PROBLEMS` are named by file and line; with `strict` the first one
    raises `DataError`. Records that a filter or selection leaves out are counted by reason.
    """

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, kind: str, detail: str = "") -> None:
        """Report a fault at `place` ("file:line")."""
        line = plain(f"{printable(place)}: {kind}" + (f" ({detail})" if detail else "")).replace("\n", "\\n")
        if self.strict:
            raise DataError(f"{line}; correct or remove the record")
        self.counts[kind] += 1
        if len(self.named) < NAMED_PROBLEMS:
            self.named.append(line)

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count valid records that are not wanted."""
        if count:
            self.filtered[reason] += count

    def merge(self, other: "ReadingProblems") -> None:
        """Add the counts of a later part of the same source."""
        self.counts.update(other.counts)
        self.filtered.update(other.filtered)
        self.named += other.named[: NAMED_PROBLEMS - len(self.named)]

    def facts(self) -> dict[str, Any]:
        """The counts, for JSON."""
        return {"problems": dict(self.counts), "named": list(self.named), "left_out": dict(self.filtered)}

    @classmethod
    def restored(cls, facts: Mapping[str, Any]) -> Self:
        """Recreate the counts from `facts`."""
        return cls(False, Counter(facts["problems"]), list(facts["named"]), Counter(facts["left_out"]))

    @property
    def total(self) -> int:
        """Number of faults."""
        return sum(self.counts.values())


def printable(path: str) -> str:
    """Convert a path to valid UTF-8; file systems and archives allow any bytes in names."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def content_key(text: str) -> str:
    """The split key of a document without a key: equal texts are in the same split."""
    return hashlib.sha256(text.encode()).hexdigest()


Row = Mapping[str, Any]
"""A raw record: the object in a line of JSON, or a row of a table."""


@dataclass(frozen=True)
class Filters:
    """Filters of records. A record that lacks a field needed by a filter is left out and counted.

    Recipes are validated against it (preparation/recipe.py).

    Attributes:
        min_stars: minimum stars of the repository.
        languages: keep only these, case-insensitive; empty keeps all.
        max_bytes: maximum bytes of the UTF-8 text.
        generated, minified: True keeps generated and minified files.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    min_stars: Annotated[int, Field(ge=0)] = 0
    languages: tuple[str, ...] = ()
    max_bytes: Annotated[int, Field(gt=0)] | None = None
    generated: bool = True
    minified: bool = True


@dataclass(frozen=True)
class SourceSpec:
    """A named source of documents.

    Attributes:
        name: name of the source and its shards.
        paths: files or folders; for `huggingface` also names on the Hub.
        reader: a name in `megatron_coca.data.readers.READERS`; `files` determines formats from file names.
        fields: paths in a record of `text`, `key`, `set`, `stars`, `language`, `path`, `repository`, `messages`,
            `tools`; dots reach into nested records. The others keep their defaults.
        documents: a document of a text file is the file or a line.
        sets: keep only the records of these sets; empty keeps all.
        divide: write each set to its own shards (`Document.part`).
        filters: filters of records.
        metadata: JSONL file with one object per repository (`repository`, `stars`), for `repositories`.
        options: further arguments of `huggingface`: name, split, revision.
        max_record_mib: longer records (line, page, row, source file, text file that is one document) are skipped and
            named. This bounds the memory: tokenizing a record takes about twenty times its size.
        messages: for records that are chats: the loss counts the answers (`answers`), the last answer (`last`) or every
            token (`all`). None for texts.
    """

    name: str
    paths: Sequence[Path | str]
    reader: str = "files"
    fields: Mapping[str, str] = field(default_factory=dict)
    documents: Literal["file", "line"] = "file"
    sets: Sequence[str] = ()
    divide: bool = False
    filters: Filters = Filters()
    metadata: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    max_record_mib: int = 64
    messages: Literal["answers", "last", "all"] | None = None

    @property
    def max_record(self) -> int:
        """`max_record_mib` in bytes."""
        return self.max_record_mib << 20


KEY_READERS: dict[str, tuple[str, ...]] = {
    "fields": ("files", "huggingface"),
    "documents": ("files",),
    "sets": ("files", "huggingface"),
    "divide": ("files", "huggingface"),
    "metadata": ("repositories",),
    "options": ("huggingface",),
    "messages": ("files", "huggingface"),
}
"""Keys of a `SourceSpec` that only some readers use, with these readers."""


def check_keys(spec: SourceSpec, reader: str) -> None:
    """Raise `DataError` for a key that is set but that `reader` ignores."""
    unset = SourceSpec(spec.name, spec.paths)
    for key, readers in KEY_READERS.items():
        given = getattr(spec, key)
        if reader not in readers and given and given != getattr(unset, key):
            raise DataError(
                f"{spec.name}: the reader {reader} does not use {key}; remove it, or use the reader "
                f"{' or '.join(readers)}"
            )


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """A file, a repository or a data set, read from beginning to end.

    Attributes:
        path: path in messages.
        size: bytes on disk, the sum of `Chunk.read`; 0 if unknown.
        stamp: a text that changes if the content may have changed (size and modification time); empty if unknown.
    """

    path: str
    size: int
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a unit. Cutting it off is cheap; any process can parse it into documents.

    Attributes:
        path: the file, with `!member` for one inside an archive.
        first: number of its first record in that file, from 1; 0 if the file is one record.
        payload: the raw records or the names of files; small enough to send to another process.
        read: bytes of the unit read from disk since the previous chunk.
    """

    path: str
    first: int
    payload: Any
    read: int


class Reader(ABC):
    """Reads the units of a `SourceSpec`; can be pickled."""

    @abstractmethod
    def units(self) -> list[ReadUnit]:
        """List the units in reading order. Raises `DataError` for a missing or unreadable path."""

    @abstractmethod
    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut a unit deterministically. Memory holds one chunk, or one record if it is larger.

        Raises `DataError` if the unit is damaged.
        """

    @abstractmethod
    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """Yield the documents of a chunk in order. Unusable records go to `problems`."""

    @abstractmethod
    def stamp(self, unit: ReadUnit) -> str:
        """The stamp of a unit in its current state. Raises `DataError` if it no longer exists."""

    def check_unchanged(self, unit: ReadUnit) -> None:
        """Raise `DataError` if a unit has changed since it was listed, because reading may have mixed old and new
        content.
        """
        if unit.stamp and self.stamp(unit) != unit.stamp:
            raise DataError(
                f"{printable(unit.path)}: changed while it was read; wait until it is completely written or "
                "downloaded, then run the same command again"
            )

    def unread(self) -> Counter[str]:
        """Count the files in the folders that are not read, by reason; none by default."""
        return Counter()
