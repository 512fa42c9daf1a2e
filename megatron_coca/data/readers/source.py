"""What is asked of a reader, and what it hands on: sources, units, chunks."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from megatron_coca.data.errors import DataError

NAMED_PROBLEMS = 1000  # so that a corpus of nothing but bad lines cannot fill the memory


@dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
        text: what is tokenized.
        key: decides the split; documents with one key stay on one side.
        part: the set within its source that it belongs to, where sets are chosen or told apart; else empty.
    """

    text: str
    key: str
    part: str = ""


class RejectedRecord(Exception):
    """A record that cannot be used, by a ``kind`` of fault that is counted, and a ``detail`` that is not."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class LeftOut(Exception):
    """A valid record that is not wanted, by ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ReadingProblems:
    """Records that did not become documents.

    Faults are counted by kind, and the first ``NAMED_PROBLEMS`` named by file and line; with ``strict`` the first one
    raises ``DataError`` instead. What a filter or a selection left out on purpose is counted by reason.
    """

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, kind: str, detail: str = "") -> None:
        """Report a record at ``place`` ("file:line") of one ``kind`` of fault."""
        line = f"{place}: {kind}" + (f" ({detail})" if detail else "")
        if self.strict:
            raise DataError(f"{line}. Correct or remove the record.")
        self.counts[kind] += 1
        if len(self.named) < NAMED_PROBLEMS:
            self.named.append(line)

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count records that are sound and not wanted."""
        if count:
            self.filtered[reason] += count

    def merge(self, other: "ReadingProblems") -> None:
        """Add what was found in a later stretch of the same source."""
        self.counts.update(other.counts)
        self.filtered.update(other.filtered)
        self.named += other.named[: NAMED_PROBLEMS - len(self.named)]

    def facts(self) -> dict[str, Any]:
        """What was found, as JSON can hold it."""
        return {"problems": dict(self.counts), "named": list(self.named), "left_out": dict(self.filtered)}

    @classmethod
    def restored(cls, facts: Mapping[str, Any], strict: bool) -> Self:
        """What ``facts`` told of, to be added to."""
        return cls(strict, Counter(facts["problems"]), list(facts["named"]), Counter(facts["left_out"]))

    @property
    def total(self) -> int:
        """Number of faults."""
        return sum(self.counts.values())


def content_key(text: str) -> str:
    """Split key of a document that has no name of its own: equal texts land on the same side of the split."""
    return hashlib.sha256(text.encode()).hexdigest()


Row = Mapping[str, Any]
"""A record before its fields are told apart: what a line of JSON or a row of a table holds."""


@dataclass(frozen=True)
class Filters:
    """Which records to keep. A record that lacks a field which a filter needs is left out, and counted.

    Attributes:
        min_stars: stars of the repository, at least.
        licences: keep these only (SPDX names, without regard to case); empty keeps all.
        languages: keep these only, without regard to case; empty keeps all.
        min_bytes, max_bytes: of the UTF-8 text, both inclusive.
        generated, minified: True keeps what a program wrote, and what was squeezed for transport.
    """

    min_stars: int = 0
    licences: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    min_bytes: int = 0
    max_bytes: int | None = None
    generated: bool = True
    minified: bool = True


@dataclass(frozen=True)
class SourceSpec:
    """A named source: where it lies and how it is read.

    Attributes:
        name: names its shards.
        paths: files or folders; for ``huggingface`` also names at the hub.
        reader: a name in ``megatron_coca.data.readers.READERS``; ``files`` goes by the names of the files.
        fields: where a record holds ``text``, ``key``, ``set``, ``stars``, ``licence``, ``language``, ``path``,
            ``repository``; dots reach into nested records. Those not given have their defaults.
        documents: what one document is in a text file: the file, each line, or each stretch between blank lines.
        sets: keep the records of these sets only; empty keeps all.
        divide: make each set a part of its own (``Document.part``).
        filters: which records to keep.
        metadata: JSONL file with one object per repository (``repository``, ``stars``, ``licence``), for
            ``repositories``.
        options: further arguments of a reader (``huggingface``: name, split, ...).
        max_record_mib: a longer record (line, page, row, file of code, text file that is one document) is skipped and
            named. It bounds the memory: turning a record into tokens takes some twenty times its size.
    """

    name: str
    paths: Sequence[Path | str]
    reader: str = "files"
    fields: Mapping[str, str] = field(default_factory=dict)
    documents: Literal["file", "line", "paragraph"] = "file"
    sets: Sequence[str] = ()
    divide: bool = False
    filters: Filters = Filters()
    metadata: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    max_record_mib: int = 64

    @property
    def max_record(self) -> int:
        """``max_record_mib`` in bytes."""
        return self.max_record_mib << 20


KEY_READERS: dict[str, tuple[str, ...]] = {
    "fields": ("files", "huggingface"),
    "documents": ("files",),
    "sets": ("files", "huggingface"),
    "divide": ("files", "huggingface"),
    "metadata": ("repositories",),
    "options": ("huggingface",),
}
"""Keys of a ``SourceSpec`` that only some readers know what to do with, and which."""


def check_keys(spec: SourceSpec, reader: str) -> None:
    """``DataError`` for a key that is set and has no meaning for ``reader``, instead of passing over it."""
    unset = SourceSpec(spec.name, spec.paths)
    for key, readers in KEY_READERS.items():
        given = getattr(spec, key)
        if reader not in readers and given and given != getattr(unset, key):
            raise DataError(
                f"{spec.name}: {key} means nothing to the reader {reader}. Remove it, or take {' or '.join(readers)}."
            )


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """What is read from its beginning to its end: a file, a repository, a data set.

    Attributes:
        path: as it is reported.
        size: bytes on the disk, which ``Chunk.read`` adds up to; 0 where nobody knows.
        stamp: another text when the content may have changed (size and time of the last change); empty where unknown.
    """

    path: str
    size: int
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a unit, cut cheaply where it is read, to be turned into documents in any process.

    Attributes:
        path: the file, with ``!member`` for one inside an archive.
        first: number of its first record in that file, counted from 1; 0 where the file is one record.
        payload: the raw records, or what finds them again; small enough to be sent to another process.
        read: bytes of the unit read from the disk since the chunk before.
    """

    path: str
    first: int
    payload: Any
    read: int


class Reader(Protocol):
    """Made from a ``SourceSpec``; can be pickled."""

    def units(self) -> list[ReadUnit]:
        """What there is to read, in the order of reading. ``DataError`` for a path that is missing or unreadable."""

    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut a unit, the same way every time; memory holds one chunk, or one record where that is larger.

        Raises ``DataError`` at the place where the unit is damaged, after all that comes before it was yielded.
        """

    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """The documents of a chunk, in order. What cannot be used goes to ``problems``."""

    def unread(self) -> Counter[str]:
        """Files in the named folders that belong to no unit, by the reason. Looks at the folders again."""
