"""Declarations of the numbers that tasks measure, with functions that read these numbers from result files.

Pages, results.csv, LaTeX tables, notebooks and ablations read numbers through these declarations, which import no
PyTorch.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple


class Reading(NamedTuple):
    """One number of an entry: its name in results.csv, the length, the value, and the ends of its 95% interval."""

    name: str
    length: int | None
    value: float
    low: float | None = None
    high: float | None = None


def length_of(entry: Any) -> int | None:
    return int(entry.length)


@dataclass(frozen=True)
class Number:
    """A number in the entries of a result file.

    Attributes:
        name: its name in results.csv. `{entry.depth}` in it is replaced by the entry's field `depth`.
        read: returns the number from an entry, or None if the entry does not have it. By default, the number is the
            accuracy of `tally`.
        quantity: its name in sentences and on axes; by default `name`.
        unit: its unit, such as "nats per token"; empty for a plain number.
        best: whether the lowest or the highest number is the best, or neither.
        digits: digits after the decimal point in tables.
        logarithm: returns the natural logarithm of the number from an entry. If set, the number is averaged over seeds
            by its logarithm, and its axis is logarithmic.
        share: whether the number lies between 0 and 1.
        tally: returns the `Tally` of an entry: the summary of its cases, with a Wilson interval.
        sums: returns one sum per document or one value per case from an entry, for paired comparisons.
        length: returns the length in tokens at which the number was measured.
        published: the `metric` in published.yaml of tables with this number.
        learned: the value that at least one model must reach at some length. Otherwise no model has learned the task,
            and the sentence at the top of a report is about another task that a model has learned, if there is one.
    """

    name: str
    read: Callable[[Any], float | None] | None = None
    quantity: str = ""
    unit: str = ""
    best: Literal["lowest", "highest", "neither"] = "highest"
    digits: int = 2
    logarithm: Callable[[Any], float] | None = None
    share: bool = False
    tally: Callable[[Any], Any] | None = None
    sums: Callable[[Any], Sequence[float]] | None = None
    length: Callable[[Any], int | None] = length_of
    published: str = ""
    learned: float = float("-inf")

    @property
    def shown_as(self) -> str:
        return self.quantity or self.name

    def reading(self, entry: Any) -> Reading | None:
        """Return the number of an entry, or None if the entry does not have it."""
        tally = None if self.tally is None else self.tally(entry)
        value = self.read(entry) if self.read is not None else getattr(tally, "accuracy", None)
        if value is None:
            return None
        name = self.name.format(entry=entry) if "{" in self.name else self.name
        return Reading(name, self.length(entry), value, getattr(tally, "low", None), getattr(tally, "high", None))

    def value(self, entry: Any) -> float | None:
        """Return the number of an entry, or None if the entry does not have it."""
        found = self.reading(entry)
        return None if found is None else found.value

    def values(self, entry: Any) -> Sequence[float]:
        """Return one sum per document or one value per case; nothing for a number without `sums`."""
        return () if self.sums is None else self.sums(entry)

    def averaged(self, entry: Any) -> float | None:
        """Return the value to average over seeds: the logarithm if `logarithm` is set, otherwise the number itself."""
        return self.value(entry) if self.logarithm is None else self.logarithm(entry)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("[^,]*".join(map(re.escape, re.split(r"\{[^}]*\}", self.name))))

    def is_named(self, name: str) -> bool:
        """Return True if `name` is the name of this number in some entry."""
        return self._pattern.fullmatch(name) is not None
