"""The types that all readers share: sources, units, chunks, documents, and counts of problems."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import BeforeValidator, ConfigDict, Field

from megatron_coca.data.errors import DataError
from megatron_coca.support.plain_text import plain
from megatron_coca.support.safe_yaml import as_list

NAMED_PROBLEMS = 1000  # limits the memory if all lines of a corpus are faulty
EMPTY_TEXT = "empty text"
NOT_COUNTED = frozenset({EMPTY_TEXT})
"""Kinds of faults that `ReadingProblems.faulty` excludes, because they do not suggest a wrong format. For example,
tables of paragraphs have many empty rows.
"""


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a corpus.

    Attributes:
        text: the text to tokenize.
        key: determines the split; documents with the same key are in the same split.
        part: name of the document's set within the source. Empty if the source neither selects sets nor divides its
            documents by set.
        place: the file and line of the record, for messages.
    """

    text: str
    key: str
    part: str = ""
    place: str = field(default="", compare=False)


class RejectedRecord(Exception):
    """Raised for an unusable record. Faults are counted by their `kind`, and `detail` appears only in messages."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


class LeftOut(Exception):
    """Raised for a valid record that is left out for the given `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class ReadingProblems:
    """Counts of records that did not become documents.

    Faults are counted by kind, and the first `NAMED_PROBLEMS` faults are listed with file and line. With `strict`, the
    first fault raises `DataError`. Records that a filter or a selection leaves out are counted by reason.

    Attributes:
        counts, sizes: number and total size in bytes of the faulty records, by kind.
        read: total size in bytes of all records.
        files: number of files that begin in the part that was read, if the reader reads files.
        without_record: identities of files with only faulty records in their first part.
        with_record: identities of files with a usable record in a later part.
    """

    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    named: list[str] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    sizes: Counter[str] = field(default_factory=Counter)
    read: int = 0
    files: int = 0
    # The two sets are not compared, because each set depends on the division of files into parts. Their difference does
    # not depend on it.
    without_record: set[str] = field(default_factory=set, compare=False)
    with_record: set[str] = field(default_factory=set, compare=False)

    def add(self, place: str, kind: str, detail: str = "", size: int = 0) -> None:
        """Count and list a fault at `place` ("file:line") in a record of `size` bytes."""
        line = plain(f"{printable(place)}: {kind}" + (f" ({detail})" if detail else "")).replace("\n", "\\n")
        if self.strict:
            raise DataError(f"{line}; correct or remove the record")
        self.counts[kind] += 1
        self.sizes[kind] += size
        if len(self.named) < NAMED_PROBLEMS:
            self.named.append(line)

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count valid records that are left out."""
        if count:
            self.filtered[reason] += count

    def file_part(self, path: str, begins: bool, usable: int, faulty: int) -> None:
        """Add the numbers of usable and faulty records in one part of a file. A file is lost if no part has a usable
        record.
        """
        identity = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
        self.files += begins
        if begins and faulty and not usable:
            self.without_record.add(identity)
        elif usable and not begins:
            self.with_record.add(identity)

    def merge(self, other: "ReadingProblems") -> None:
        """Add the counts for a later part of the same source."""
        self.counts.update(other.counts)
        self.filtered.update(other.filtered)
        self.named += other.named[: NAMED_PROBLEMS - len(self.named)]
        self.sizes.update(other.sizes)
        self.read += other.read
        self.files += other.files
        self.without_record |= other.without_record
        self.with_record |= other.with_record

    def facts(self) -> dict[str, Any]:
        """Return the counts as a mapping for JSON."""
        return {
            "problems": dict(self.counts),
            "named": list(self.named),
            "left_out": dict(self.filtered),
            "sizes": dict(self.sizes),
            "read": self.read,
            "files": self.files,
            "without_record": sorted(self.without_record),
            "with_record": sorted(self.with_record),
        }

    @classmethod
    def restored(cls, facts: Mapping[str, Any]) -> Self:
        """Recreate the counts from the result of `facts`."""
        return cls(
            strict=False,
            counts=Counter(facts["problems"]),
            named=list(facts["named"]),
            filtered=Counter(facts["left_out"]),
            sizes=Counter(facts["sizes"]),
            read=facts["read"],
            files=facts["files"],
            without_record=set(facts["without_record"]),
            with_record=set(facts["with_record"]),
        )

    @property
    def total(self) -> int:
        """The total number of faults."""
        return sum(self.counts.values())

    @property
    def faulty(self) -> int:
        """The number of faults, except those of the kinds in `NOT_COUNTED`."""
        return sum(count for kind, count in self.counts.items() if kind not in NOT_COUNTED)

    @property
    def faulty_bytes(self) -> int:
        """The size in bytes of the faulty records, except those of the kinds in `NOT_COUNTED`."""
        return sum(size for kind, size in self.sizes.items() if kind not in NOT_COUNTED)

    @property
    def lost_files(self) -> int:
        """The number of files without any usable record."""
        return len(self.without_record - self.with_record)


def is_utf8(path: str) -> bool:
    """Return True if the bytes of a path on disk are valid UTF-8. The characters that Python shows for these bytes
    depend on the locale.
    """
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return False
    return True


def printable(path: str) -> str:
    """Convert a path to valid UTF-8. File systems and archives allow any bytes in names."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def content_key(text: str) -> str:
    """Return the split key for a document without its own key. Equal texts have the same key, so they are in the same
    split.
    """
    return hashlib.sha256(text.encode()).hexdigest()


RecordRow = Mapping[str, Any]
"""The content of a raw record: the object in a JSON line, or a row of a table."""


class RawRecord(NamedTuple):
    """A raw record: its place ("file:line"), its content and its size in bytes. The size of a table row is an average.
    The size is 0 if the reader does not count bytes.
    """

    place: str
    row: RecordRow
    size: int = 0


@dataclass(frozen=True)
class Filters:
    """Filters for records. A record without a field that a filter needs is left out and counted.

    preparation/recipe.py validates the filters in recipes with this class.

    Attributes:
        min_stars: minimum number of stars of the repository.
        languages: keep only these languages (case-insensitive); empty keeps all languages.
        max_bytes: maximum size of the text in UTF-8 bytes.
        generated, minified: whether generated and minified files are kept.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    min_stars: Annotated[int, Field(ge=0)] = 0
    languages: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    max_bytes: Annotated[int, Field(gt=0)] | None = None
    generated: bool = True
    minified: bool = True


@dataclass(frozen=True)
class SourceSpec:
    """A named source of documents.

    Attributes:
        name: name of the source. The names of its shards begin with it.
        paths: files or folders; for `huggingface` also names of data sets on the Hub.
        reader: a key of `megatron_coca.data.readers.READERS`. The reader `files` determines the format of each file
            from its name.
        fields: the paths at which a record contains `text`, `key`, `set`, `stars`, `language`, `path`, `repository`,
            `messages` and `tools`. Dots reach into nested records. Fields that are not given have default paths.
        documents: `file` if each text file is one document, or `line` if each line of a text file is one document.
        sets: keep only the records of these sets; empty keeps all records.
        divide: whether each set (`Document.part`) is written to its own shards.
        filters: the filters for records.
        metadata: for the reader `repositories`, a JSONL file with one object (`repository`, `stars`) per repository.
        options: for the reader `huggingface`, the options name, split and revision.
        max_record_mib: maximum size of a record in MiB. A record is a line, a table row, a source file, or a text file
            that is one document. Longer records are skipped and listed. This limits the memory, because tokenizing a
            record needs about twenty times its size.
        messages: for records that are chats, the tokens that count in the loss: those of all answers (`answers`), those
            of the last answer (`last`) or every token (`all`). None if the records are texts.
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


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """A file, a repository or a data set that is read from beginning to end.

    Attributes:
        path: the path or name of the unit, also used in messages.
        size: size in bytes on disk, which is the sum of `Chunk.read`; 0 if unknown.
        stamp: a string that changes if the content may have changed, such as size and modification time; empty if
            unknown.
    """

    path: str
    size: int
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a unit. Cutting a unit into chunks is cheap, and any process can parse a chunk into documents.

    Attributes:
        path: path of the file, followed by `!member` for a file inside an archive.
        first: number of the first record of the chunk in its file, counted from 1; 0 if the file is one record.
        payload: the raw records, or file names. It is small enough to send to another process.
        read: number of bytes of the unit that were read from disk since the previous chunk.
    """

    path: str
    first: int
    payload: Any
    read: int


class Reader(ABC):
    """Reads the units of a `SourceSpec`. A reader can be pickled.

    Attributes:
        uses: the keys of a `SourceSpec` that this reader uses, but not every reader. `open_reader` rejects a spec with
            a key that only other readers use.
    """

    uses: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, spec: SourceSpec) -> None:
        """Prepare to read. Raises `DataError` for an unusable value in `spec`."""

    @abstractmethod
    def units(self) -> list[ReadUnit]:
        """List the units in reading order. Raises `DataError` for a missing or unreadable path."""

    @abstractmethod
    def chunks(self, unit: ReadUnit) -> Iterator[Chunk]:
        """Cut a unit into chunks, deterministically. Only one chunk, or one larger record, is in memory at a time.

        Raises `DataError` if the unit is damaged.
        """

    @abstractmethod
    def documents(self, chunk: Chunk, problems: ReadingProblems) -> Iterator[Document]:
        """Yield the documents of a chunk in order. Unusable records are added to `problems`."""

    @abstractmethod
    def stamp(self, unit: ReadUnit) -> str:
        """Return the stamp of a unit in its current state. Raises `DataError` if the unit no longer exists."""

    def check_unchanged(self, unit: ReadUnit) -> None:
        """Raise `DataError` if a unit has changed since it was listed, because then the documents may mix old and new
        content.
        """
        if unit.stamp and self.stamp(unit) != unit.stamp:
            raise DataError(
                f"{printable(unit.path)}: changed while it was read; wait until it is written or downloaded "
                "completely, then run the same command again"
            )

    def unread(self) -> Counter[str]:
        """Count the files in the folders of the source that are not read, by reason. By default, there are no such
        files.
        """
        return Counter()
