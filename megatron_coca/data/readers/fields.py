"""Records to documents: which fields hold the text and what else is known of it, and which records are wanted."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers.document import Document, Problems, RejectedRecord, content_key
from megatron_coca.data.readers.filters import Facts, admit
from megatron_coca.data.readers.formats import decode
from megatron_coca.data.readers.source import Filters, Row, SourceSpec

DEFAULTS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "key": ("key",),
    "set": ("meta.pile_set_name",),
    "stars": ("stars", "max_stars_count", "stargazers_count"),
    "licence": ("licence", "license", "licenses", "max_stars_repo_licenses"),
    "language": ("language", "lang"),
    "path": ("path", "max_stars_repo_path"),
    "repository": ("repository", "repo_name", "max_stars_repo_name"),
}
"""Where a field is looked for, first come first served. The names are those of the Pile and of The Stack."""

_FACTS = ("stars", "licence", "language", "path")
_ABSENT = object()


class LeftOut(Exception):
    """A record that is sound and not wanted, by the ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Fields:
    """Makes the documents of a source out of its records.

    Raises:
        DataError: ``spec.fields`` names a field that does not exist.
    """

    def __init__(self, spec: SourceSpec) -> None:
        if unknown := sorted(set(spec.fields) - set(DEFAULTS)):
            raise DataError(f"{spec.name}: unknown fields {unknown}. Known are {', '.join(DEFAULTS)}.")
        self._paths = DEFAULTS | {name: (path,) for name, path in spec.fields.items()}
        self._named_key = spec.fields.get("key")
        self._sets, self._divide = frozenset(spec.sets), spec.divide
        self._filters = spec.filters if spec.filters != Filters() else None

    def documents(self, rows: Iterable[tuple[str, Row]], problems: Problems) -> Iterator[Document]:
        """The documents of (place, record); the others go to ``problems``."""
        for place, row in rows:
            try:
                document = self.document(row)
            except RejectedRecord as rejected:
                problems.add(place, rejected.kind, rejected.detail)
            except LeftOut as left_out:
                problems.leave_out(left_out.reason)
            else:
                yield document

    def document(self, row: Row) -> Document:
        """One document. Raises ``RejectedRecord``, and ``LeftOut`` for one of another set or filtered out."""
        part = self._set(row) if self._sets or self._divide else ""
        text = self._text(row)
        if self._filters and (reason := admit(text, self._facts(row), self._filters)):
            raise LeftOut(reason)
        return Document(text, self._key(row) or content_key(text), part)

    def columns(self, names: Sequence[str], place: str) -> list[str]:
        """Those of a table's columns that are needed. ``DataError`` where none of them holds the text."""
        needed = {"text", "key", "repository"} | ({"set"} if self._sets or self._divide else set())
        needed |= set(_FACTS) if self._filters else set()
        roots = {name: {root for path in self._paths[name] for root in _roots(path)} for name in needed}
        if not roots["text"] & set(names):
            raise DataError(f"{place}: no column {self._paths['text'][0]!r}; the table has {list(names)[:20]}.")
        return [name for name in names if any(name in found for found in roots.values())]

    def _look_up(self, row: Row, name: str) -> Any:
        for path in self._paths[name]:
            found = row[path] if path in row else _nested(row, path)
            if found is not None and found is not _ABSENT:
                return found
        return None

    def _set(self, row: Row) -> str:
        found = self._look_up(row, "set")
        if not isinstance(found, str) or not found:
            raise _missing(row, self._paths["set"][0])
        if self._sets and found not in self._sets:
            raise LeftOut("set not chosen")
        return _valid(found)

    def _text(self, row: Row) -> str:
        path = self._paths["text"][0]
        text = row[path] if path in row else _nested(row, path)
        if text is _ABSENT:
            raise _missing(row, path)
        text = decode(text) if isinstance(text, bytes) else text  # tables may hold strings as plain bytes
        if not isinstance(text, str):
            raise RejectedRecord("text is not a string", f"field {path!r} holds {type(text).__name__}")
        if not text or text.isspace():
            raise RejectedRecord("empty text")
        return _valid(text)

    def _key(self, row: Row) -> str:
        """The key that the record names, else its repository; empty where it has neither."""
        if self._named_key and self._named_key not in row and _nested(row, self._named_key) is _ABSENT:
            raise _missing(row, self._named_key)
        for name in ("key", "repository"):
            found = self._look_up(row, name)
            if isinstance(found, str | int) and found != "":
                return _valid(str(found))
        return ""

    def _facts(self, row: Row) -> Facts:
        stars, licence, language, path = (self._look_up(row, name) for name in _FACTS)
        return Facts(
            stars=_integer(stars),
            licences=_strings(licence),
            language=language if isinstance(language, str) else None,
            path=path if isinstance(path, str) else None,
        )


def _nested(row: Row, path: str) -> Any:
    """What a dotted path leads to, where a name may itself hold dots."""
    at = path.find(".")
    while at >= 0:
        inner = row.get(path[:at])
        if isinstance(inner, Mapping):
            rest = path[at + 1 :]
            found = inner[rest] if rest in inner else _nested(inner, rest)
            if found is not _ABSENT:
                return found
        at = path.find(".", at + 1)
    return _ABSENT


def _roots(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names) + 1)]


def _missing(row: Row, path: str) -> RejectedRecord:
    return RejectedRecord("missing field", f"no {path!r}; the record has {sorted(map(str, row))[:8]}")


def _valid(text: str) -> str:
    """``text``, if UTF-8 can spell it: JSON's escapes can write halves of a surrogate pair."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise RejectedRecord("invalid Unicode", error.reason) from error
    return text


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, float) and not math.isfinite(value) else int(value)
    except (TypeError, ValueError):
        return None


def _strings(value: Any) -> tuple[str, ...] | None:
    if value is None or isinstance(value, str):
        return None if value is None else (value,)
    return tuple(map(str, value)) if isinstance(value, Sequence) else None
