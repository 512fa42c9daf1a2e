"""What a reader gives: documents, and what it has to say about the records that did not become one."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

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


@dataclass
class Problems:
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

    def merge(self, other: "Problems") -> None:
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
