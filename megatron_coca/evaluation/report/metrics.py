"""Metrics: how numbers are read from result entries, pooled over seeds and documents, and shown in table cells."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.report.document import Measure, TableCell
from megatron_coca.evaluation.report.reading import Replicate, Series
from megatron_coca.evaluation.results import Missing
from megatron_coca.evaluation.statistics import differ, estimate, geometric_estimate, wilson_interval
from megatron_coca.evaluation.tasks.retrieval.task import Tally

MISSING_TEXT = {"refused": "not supported", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""Cell text for each kind of missing entry."""
FormatNumber = Callable[[float], str]
LARGE = 1e6
"""Numbers of at least this size are written with an exponent, because a perplexity can have ninety digits."""


def decimal(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}e}" if LARGE <= abs(value) < math.inf else f"{value:.{digits}f}"


TWO_DIGITS: FormatNumber = decimal
MARK = "†"
"""The mark of significant differences. An asterisk already marks training lengths."""


def missing_cell(missing: Missing) -> TableCell:
    return TableCell(MISSING_TEXT[missing.kind], note=missing.reason, absent=True)


def mean_cell(values: Sequence[float], show: FormatNumber = TWO_DIGITS, log: bool = False) -> TableCell:
    """Return the mean of `values` with its 95% t interval. `values` contains one number per seed.

    With `log`, the values are logarithms, and the cell shows the exponentials of their mean and of the interval's ends.
    """
    found = (geometric_estimate if log else estimate)(values)
    cell = TableCell(show(found.mean), found.mean, seeds=found.count)
    if math.isnan(found.low):
        return cell
    detail = f"{show(found.low)}–{show(found.high)}" if log else f"± {show(found.high - found.mean)}"
    return replace(cell, detail=detail, low=found.low, high=found.high)


def value_cell(
    series: Series,
    at: str,
    number: Callable[[Replicate], float | None],
    show: FormatNumber = TWO_DIGITS,
    log: bool = False,
) -> TableCell:
    """Return the mean over the replicates of a series, as a cell from `mean_cell`.

    `number` reads the number of a replicate, or returns None if it has none. `at` is the name by which a result records
    the entry as missing.
    """
    numbers = [number(replicate) for replicate in series.replicates]
    known = [value for value in numbers if value is not None]
    if not known:
        reasons = [replicate.why(at) for replicate in series.replicates]
        return missing_cell(next((missing for missing in reasons if missing.kind != "not run"), reasons[0]))
    without = [
        (replicate.header.checkpoint.seed, replicate.why(at))
        for replicate, value in zip(series.replicates, numbers, strict=True)
        if value is None
    ]
    reasons_by_seed = [f"seed {seed}: {': '.join(filter(None, (why.kind, why.reason)))}" for seed, why in without]
    note = f"{len(known)} of {len(numbers)} seeds; {'; '.join(reasons_by_seed)}" if without else ""
    return replace(mean_cell(known, show, log), note=note)


@dataclass(frozen=True)
class Metric:
    """A number in the entries of a result: how it is read, pooled over seeds, shown and compared.

    Attributes:
        at: template for the name of a missing entry, formatted with its key.
        number: reads the number from an entry or, if `tally` is set, from the entry's tally; by default the accuracy.
        key: returns the key of the entry in a table column; by default, the column is a length.
        tally: returns the `Tally` of an entry's cases. Their Wilson interval is shown if the seeds give no t interval.
        sums: reads one sum per document or one value per case, for paired comparisons.
        log: whether `number` is the logarithm of the number to show.
        lowest: whether the lowest number is the best.
    """

    at: str
    number: Callable[[Any], float | None] = lambda entry: entry.accuracy
    show: FormatNumber = TWO_DIGITS
    key: Callable[[int], tuple[Any, ...]] = lambda length: (length,)
    tally: Callable[[Any], Tally | None] | None = None
    sums: Callable[[Any], Sequence[float]] | None = None
    log: bool = False
    lowest: bool = False

    def of(self, replicate: Replicate, column: int) -> float | None:
        """Return the number of one seed, or None if it was not measured."""
        entry = replicate.entries.get(self.key(column))
        entry = entry if entry is None or self.tally is None else self.tally(entry)
        return None if entry is None else self.number(entry)

    def cell(self, series: Series, column: int, reference: Series | None = None) -> TableCell:
        """Return a cell with the number of a single seed, or with the mean over seeds and its t interval.

        MARK is added if the documents' losses differ significantly from those of `reference`.
        """
        key = self.key(column)
        value = value_cell(series, self.at.format(*key), lambda each: self.of(each, column), self.show, self.log)
        if self.tally is not None:
            return self._tally_cell(series, key, value)
        if self.sums is None or value.value is None:
            return value
        sample = self._sample(series, key)
        if self.lowest and reference is not None and reference is not series:
            marked = differ(sample, self._sample(reference, key))
            value = replace(value, text=value.text + MARK * marked)
        return replace(value, sample=sample)

    def _tally_cell(self, series: Series, key: tuple[Any, ...], cell: TableCell) -> TableCell:
        assert self.tally is not None
        found = [self.tally(replicate.entries[key]) for replicate in series.replicates if key in replicate.entries]
        tallies = [tally for tally in found if tally is not None]
        if found and not tallies:
            return TableCell("–", detail="no case")
        if cell.value is None or cell.low is not None:
            return cell
        # A single seed, or seeds that agree exactly, have no t interval.
        low, high = wilson_interval(cell.value, sum(tally.count for tally in tallies))
        return replace(cell, detail=f"{low:.2f}–{high:.2f}", low=low, high=high)

    def _sample(self, series: Series, key: tuple[Any, ...]) -> tuple[float, ...]:
        """Return one number per document: the mean of the document's sums over the seeds that have the entry.

        A document that one of these seeds lacks is left out. The result is empty if no seed has the entry.
        """
        assert self.sums is not None
        sums = [self.sums(replicate.entries[key]) for replicate in series.replicates if key in replicate.entries]
        return tuple(fmean(values) for values in zip(*sums, strict=False))


def metric_of(number: Number, at: str = "length {}", key: Callable[[int], tuple[Any, ...]] | None = None) -> Metric:
    """Return the metric of a declared number. `at` and `key` are fields of `Metric`."""
    metric = Metric(at, show=partial(decimal, digits=number.digits), tally=number.tally, sums=number.sums)
    read = number.logarithm or number.read
    metric = metric if read is None else replace(metric, number=read)
    metric = metric if key is None else replace(metric, key=key)
    return replace(metric, log=number.logarithm is not None, lowest=number.best == "lowest")


def measure_of(number: Number, **changes: Any) -> Measure:
    """Return the measure of a declared number for the sentence at the top of a report."""
    measure = Measure(number.shown_as, lowest=number.best == "lowest", least=number.learned, digits=number.digits)
    return replace(measure, **changes)
