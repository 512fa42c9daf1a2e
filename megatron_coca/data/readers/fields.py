"""Convert records to documents: look up the text and metadata of a record, and apply the filters."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.chats import chat_text
from megatron_coca.data.readers.source import (
    EMPTY_TEXT,
    Document,
    Filters,
    LeftOut,
    RawRecord,
    ReadingProblems,
    RecordRow,
    RejectedRecord,
    SourceSpec,
    content_key,
)
from megatron_coca.data.readers.streams import decode
from megatron_coca.support.safe_yaml import read_yaml

# Languages ------------------------------------------------------------------------------------------------------------

_CODE = read_yaml(Path(__file__).with_name("source_code.yaml"))
_BY_ENDING, _BY_NAME, _BY_INTERPRETER = (
    {word: language for language, words in _CODE[key].items() for word in words.split()}
    for key in ("endings", "names", "interpreters")
)
PROSE = frozenset(("AsciiDoc", "Markdown", "TeX", "Text", "reStructuredText"))
"""Languages in which a whole paragraph may be on one line."""
LANGUAGES = frozenset(_BY_ENDING.values()) | frozenset(_BY_NAME.values())


def language_of_path(path: str) -> str | None:
    """Return the language of a file, determined by its name, or None if it is unknown."""
    name = path.rpartition("/")[2].lower()
    return _BY_NAME.get(name) or _BY_ENDING.get(name.rpartition(".")[2] if "." in name else "")


def language_of_script(text: str) -> str | None:
    """Return the language of a script, determined by its first line (`#!/usr/bin/env python3`), or None if it is
    unknown.
    """
    if not text.startswith("#!"):
        return None
    words = text[2:].partition("\n")[0][:200].split()
    programs = [PurePosixPath(word).name for word in words if not word.startswith("-") and "=" not in word]
    if programs[:1] == ["env"]:
        programs = programs[1:]
    return _BY_INTERPRETER.get(programs[0].lower().rstrip("0123456789.")) if programs else None


# Filters --------------------------------------------------------------------------------------------------------------

# The training data of Codex excludes files with an average line length above 100 characters or a line above 1,000 (Chen
# et al. 2021, "Evaluating Large Language Models Trained on Code", section 3.1). CodeParrot and The Stack use the same
# limits.
MEAN_LINE, LONGEST_LINE = 100, 1000

_HEAD_CHARACTERS, _HEAD_LINES = 2000, 5
_MARKERS, _FIRST_LINE_MARKERS = _CODE["generated_markers"], _CODE["first_line_markers"]
_GENERATED_NAMES, _VENDORED_FOLDERS = (frozenset(_CODE[key].split()) for key in ("generated_names", "vendored_folders"))
_GENERATED_ENDINGS, _MINIFIED_ENDINGS = (tuple(_CODE[key].split()) for key in ("generated_endings", "minified_endings"))


@dataclass(frozen=True, slots=True)
class Facts:
    """The metadata of a record. Unknown values are None.

    Attributes:
        stars: number of stars of the repository.
        language: programming language, with the name that GitHub's Linguist uses.
        path: path of the file within its repository.
    """

    stars: int | None = None
    language: str | None = None
    path: str | None = None


def admit_facts(facts: Facts, filters: Filters) -> str | None:
    """Return the reason to leave out a record because of its metadata, or None to keep the record."""
    if filters.min_stars:
        if facts.stars is None:
            return "no stars given"
        if facts.stars < filters.min_stars:
            return f"stars below {filters.min_stars}"
    if filters.languages:
        language = _language(facts)
        if language is None:
            return "no language given"
        if language.lower() not in {name.lower() for name in filters.languages}:
            return "language not chosen"
    if facts.path is None or (filters.generated and filters.minified):
        return None
    *folders, name = facts.path.lower().split("/")
    if not filters.generated and not _VENDORED_FOLDERS.isdisjoint(folders):
        return "vendored"
    if not filters.generated and (name in _GENERATED_NAMES or name.endswith(_GENERATED_ENDINGS)):
        return "generated"
    return "minified" if not filters.minified and name.endswith(_MINIFIED_ENDINGS) else None


def admit(text: str, facts: Facts, filters: Filters) -> str | None:
    """Return the reason to leave out a record, or None to keep it. A record without the metadata that a filter needs is
    left out.

    Prose files (such as Markdown) may have lines of any length and never count as minified.
    """
    if reason := admit_facts(facts, filters):
        return reason
    if filters.max_bytes is not None and (reason := size_reason(len(text.encode()), filters)):
        return reason
    if not filters.generated and is_generated(text):
        return "generated"
    if not filters.minified and _language(facts) not in PROSE and is_minified(text):
        return "minified"
    return None


def size_reason(size: int, filters: Filters) -> str | None:
    """Return the reason to leave out a record of `size` bytes, or None to keep it."""
    too_large = filters.max_bytes is not None and size > filters.max_bytes
    return f"larger than {filters.max_bytes} bytes" if too_large else None


def is_generated(text: str) -> bool:
    """Return True if a marker near the start of a file says that the file is generated."""
    head = text[:_HEAD_CHARACTERS].lower()
    first_lines = "\n".join(head.split("\n", _HEAD_LINES)[:_HEAD_LINES])
    return any(marker in head for marker in _MARKERS) or any(marker in first_lines for marker in _FIRST_LINE_MARKERS)


def is_minified(text: str) -> bool:
    """Return True if lines have more than 100 characters on average, or if any line has more than 1,000 characters."""
    breaks = text.count("\n")
    if len(text) - breaks > MEAN_LINE * (breaks + (not text.endswith("\n"))):
        return True
    # Each step jumps to the last line break that is at most LONGEST_LINE characters ahead, so there are far fewer steps
    # than lines.
    start, length = 0, len(text)
    while length - start > LONGEST_LINE:
        line_break = text.rfind("\n", start, start + LONGEST_LINE + 1)
        if line_break < 0:
            return True
        start = line_break + 1
    return False


def _language(facts: Facts) -> str | None:
    return facts.language or (language_of_path(facts.path) if facts.path else None)


# Records --------------------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "key": ("key",),
    "set": ("meta.pile_set_name",),
    "stars": ("stars", "max_stars_count", "stargazers_count"),
    "language": ("language", "lang"),
    "path": ("path", "max_stars_repo_path"),
    "repository": ("repository", "repo_name", "max_stars_repo_name"),
    "messages": ("messages", "conversations"),
    "tools": ("tools",),
    "system": ("system",),
}
"""For each field, the paths at which it is looked up in a record, in order of preference. The paths include the names
that the Pile and The Stack use.
"""

_ABSENT = object()
NAME_IT = "name the text field with --text-field NAME, or with `fields: {text: NAME}` in a recipe"


class Fields:
    """Converts the records of a source to documents. Raises `DataError` if `spec.fields` contains an unknown field."""

    def __init__(self, spec: SourceSpec) -> None:
        if unknown := sorted(set(spec.fields) - set(DEFAULTS)):
            raise DataError(f"{spec.name}: unknown fields {unknown}; supported fields: {', '.join(DEFAULTS)}")
        self._paths = DEFAULTS | {name: (path,) for name, path in spec.fields.items()}
        self._named_key, self._content = spec.fields.get("key"), "messages" if spec.messages else "text"
        self._sets, self._divide = frozenset(spec.sets), spec.divide
        self._filters = spec.filters if spec.filters != Filters() else None

    def documents(self, records: Iterable[RawRecord], problems: ReadingProblems) -> Iterator[Document]:
        """Yield one document for each usable record. The other records are added to `problems`."""
        for place, row, size in records:
            try:
                set_name = self._set(row) if self._sets or self._divide else ""
                text = self._text(row) if self._content == "text" else self._chat(row)
                if self._filters and (reason := admit(text, self._facts(row), self._filters)):
                    raise LeftOut(reason)
                document = Document(text, self._key(row) or content_key(text), set_name, place)
            except RejectedRecord as rejected:
                problems.add(place, rejected.kind, rejected.detail, size)
            except LeftOut as left_out:
                problems.leave_out(left_out.reason)
            else:
                yield document

    def columns(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns that are required in a table whose columns are `names`. Raises `DataError` if no
        column contains the text or the messages.
        """
        needed = [self._content, "key", "repository"]
        needed += ["tools", "system"] if self._content == "messages" else []
        if self._sets or self._divide:
            needed.append("set")
        if self._filters:
            needed += ["stars", "language", "path"]
        roots = {field: {root for path in self._paths[field] for root in _roots(path)} for field in needed}
        if not roots[self._content] & set(names):
            column = self._paths[self._content][0]
            raise DataError(f"{place}: the table has no column {column!r}, only {list(names)[:20]}; {NAME_IT}")
        wanted = set().union(*roots.values())
        return [name for name in names if name in wanted]

    def _look_up(self, row: RecordRow, name: str) -> Any:
        for path in self._paths[name]:
            value = row[path] if path in row else _nested(row, path)
            if value is not None and value is not _ABSENT:
                return value
        return None

    def _set(self, row: RecordRow) -> str:
        name = as_text(self._look_up(row, "set"))
        if not name:
            raise _missing(row, "set", self._paths["set"][0])
        if self._sets and name not in self._sets:
            raise LeftOut("set not chosen")
        return _valid(name)

    def _text(self, row: RecordRow) -> str:
        path = self._paths["text"][0]
        text = row[path] if path in row else _nested(row, path)
        if text is _ABSENT:
            raise _missing(row, "field", path, f"; {NAME_IT}")
        if text is None:
            raise RejectedRecord(EMPTY_TEXT, "null")
        text = decode(text) if isinstance(text, bytes) else text  # tables may store strings as bytes
        if not isinstance(text, str):
            raise RejectedRecord("text is not a string", f"field {path!r} is of type {type(text).__name__}")
        if not text or text.isspace():
            raise RejectedRecord(EMPTY_TEXT)
        return _valid(text)

    def _chat(self, row: RecordRow) -> str:
        """Return the messages and tools of a chat as JSON."""
        messages = self._look_up(row, "messages")
        if messages is None:
            raise _missing(row, "messages", self._paths["messages"][0])
        return _valid(chat_text(messages, self._look_up(row, "tools"), self._look_up(row, "system")))

    def _key(self, row: RecordRow) -> str:
        """Return the key of a record, or its repository if it has no key, or an empty string if it has neither. If the
        source's `fields` name the key, every record must have a key.
        """
        if self._named_key is not None:
            value = self._look_up(row, "key")
            if value is None:
                raise _missing(row, "key", self._named_key)
            if not (key := as_text(value)):
                found = "is empty" if value == "" else f"is of type {type(value).__name__}"
                raise RejectedRecord("unusable key", f"field {self._named_key!r} {found}")
            return _valid(key)
        keys = (as_text(self._look_up(row, name)) for name in ("key", "repository"))
        return _valid(next(filter(None, keys), ""))

    def _facts(self, row: RecordRow) -> Facts:
        stars, language, path = (self._look_up(row, name) for name in ("stars", "language", "path"))
        try:
            stars = int(stars)
        except (TypeError, ValueError, OverflowError):  # also raised for NaN and infinity
            stars = None
        return Facts(
            stars=stars,
            language=as_text(language) or None,
            path=as_text(path) or None,
        )


def as_text(value: Any) -> str:
    """Return a key or name as text. The same value gives the same text in every file format. The text is empty for
    null, NaN, lists and objects.

    A whole number has no decimal point, even if it is stored as a float or Decimal. Dates are in ISO 8601. Bytes are
    decoded as UTF-8, or written in hexadecimal if they are not valid UTF-8.
    """
    if isinstance(value, float | Decimal) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, date):  # also a datetime
        return value.isoformat()
    return str(value) if isinstance(value, str | int | UUID) else ""


def _nested(row: RecordRow, path: str) -> Any:
    """Return the value at a dotted path. The names in the path may themselves contain dots."""
    dot = path.find(".")
    while dot >= 0:
        inner = row.get(path[:dot])
        if isinstance(inner, Mapping):
            rest = path[dot + 1 :]
            value = inner[rest] if rest in inner else _nested(inner, rest)
            if value is not _ABSENT:
                return value
        dot = path.find(".", dot + 1)
    return _ABSENT


def _roots(path: str) -> list[str]:
    """Return the names of the columns that may contain a dotted path. For "a.b" these are "a" and "a.b"."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _missing(row: RecordRow, what: str, path: str, hint: str = "") -> RejectedRecord:
    known = [str(name) for name, value in sorted(row.items(), key=str) if value is not None]
    return RejectedRecord(f"missing {what}", f"no {path!r}, only {known[:8]}{hint}")


def _valid(text: str) -> str:
    """Return `text`. Raises `RejectedRecord` if UTF-8 cannot encode it, as with lone surrogates from JSON escapes."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise RejectedRecord("invalid Unicode", error.reason) from error
    return text
