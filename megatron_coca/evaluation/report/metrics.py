"""Numbers of a report: how they are read from cells, pooled over seeds and documents, and shown as a table's cells."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.report.document import TableCell
from megatron_coca.evaluation.report.intervals import differ, estimate, geometric_estimate
from megatron_coca.evaluation.report.reading import Replicate, Series
from megatron_coca.evaluation.results import Missing
from megatron_coca.evaluation.retrieval.retrieval_tasks import Tally, wilson_interval

MISSING_TEXT = {"refused": "refused", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""Table text for each kind of missing cell."""
Show = Callable[[float], str]
TWO_DIGITS: Show = "{:.2f}".format
MARK = "†"
"""Not an asterisk, which marks training lengths."""


def missing_cell(missing: Missing) -> TableCell:
    return TableCell(MISSING_TEXT[missing.kind], note=missing.reason, absent=True)


def mean_cell(values: Sequence[float], show: Show = TWO_DIGITS, log: bool = False) -> TableCell:
    """The mean of `values`, one for each seed, with its 95% t interval.

    `log` is for logarithms: their mean and the ends of its interval are shown as exponentials.
    """
    found = (geometric_estimate if log else estimate)(values)
    cell = TableCell(show(found.mean), found.mean, seeds=found.count)
    if math.isnan(found.low):
        return cell
    detail = f"{show(found.low)}–{show(found.high)}" if log else f"± {show(found.high - found.mean)}"
    return replace(cell, detail=detail, low=found.low, high=found.high)


def value_cell(
    series: Series, at: str, number: Callable[[Replicate], float | None], show: Show = TWO_DIGITS, log: bool = False
) -> TableCell:
    """The `mean_cell` over the replicates of a series.

    `number` is None where a replicate has none; `at` is the name of the cell among those that are missing.
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


def interrupted(cell: Any, measured: Series | Replicate) -> str:
    """The note on a window of which only some documents are scored; empty for a complete one."""
    count = measured.header.documents.count
    return f"interrupted: the first {cell.documents} of {count} documents" if cell.documents < count else ""


@dataclass(frozen=True)
class Metric:
    """A number of a result's cells: how it is read, pooled over seeds, shown and compared.

    Attributes:
        at: name of a cell among those that are missing, with its key filled in.
        number: of a cell; of a tally its accuracy.
        tally: the cases behind the number, whose Wilson interval is shown where seeds give none.
        sums: of each document, for paired comparisons; such a cell may be interrupted.
        log: `number` is the logarithm of what is shown.
        lowest: the smallest is the best.
    """

    at: str
    number: Callable[[Any], float | None] = lambda cell: cell.accuracy
    show: Show = TWO_DIGITS
    tally: Callable[[Any], Tally | None] | None = None
    sums: Callable[[Any], Sequence[float]] | None = None
    log: bool = False
    lowest: bool = False

    def of(self, replicate: Replicate, *key: Any) -> float | None:
        """The number of one seed; None without one, and of an interrupted cell."""
        if key not in replicate.cells or (self.sums and interrupted(replicate.cells[key], replicate)):
            return None
        cell = replicate.cells[key] if self.tally is None else self.tally(replicate.cells[key])
        return None if cell is None else self.number(cell)

    def cell(self, series: Series, *key: Any, reference: Series | None = None) -> TableCell:
        """The number of a series: of one seed, or the mean over seeds with its t interval.

        An interrupted cell is left out of a mean; if all are, the number is marked and not compared. MARK is added
        where the losses of documents differ from those of `reference`.
        """
        cells = [replicate.cells[key] for replicate in series.replicates if key in replicate.cells]
        if self.tally is not None:
            return self._tally_cell(series, key, [tally for tally in map(self.tally, cells) if tally is not None])
        if self.sums is None:
            return value_cell(series, self.at.format(*key), lambda each: self.of(each, *key), self.show, self.log)
        notes = [interrupted(cell, series) for cell in cells]
        partial = bool(notes) and all(notes)

        def number(replicate: Replicate) -> float | None:
            return self.number(replicate.cells[key]) if partial and key in replicate.cells else self.of(replicate, *key)

        value = value_cell(series, self.at.format(*key), number, self.show, self.log)
        interruptions, sample = "; ".join(dict.fromkeys(filter(None, notes))), self._sample(series, key)
        marked = reference is not None and reference is not series and differ(sample, self._sample(reference, key))
        text = value.text + MARK * marked
        return replace(value, text=text, note=interruptions or value.note, partial=partial, sample=sample)

    def _tally_cell(self, series: Series, key: tuple[Any, ...], tallies: Sequence[Tally]) -> TableCell:
        if key in series.keys and not tallies:
            return TableCell("–", detail="no case")
        cell = value_cell(series, self.at.format(*key), lambda each: self.of(each, *key), self.show)
        if cell.value is None or cell.low is not None:
            return cell
        # Of one seed, and of seeds that agree exactly, which have no t interval.
        low, high = wilson_interval(cell.value, sum(tally.count for tally in tallies))
        return replace(cell, detail=f"{low:.2f}–{high:.2f}", low=low, high=high)

    def _sample(self, series: Series, key: tuple[Any, ...]) -> tuple[float, ...]:
        """The sums of every document, means over the seeds with all documents; empty without one."""
        assert self.sums is not None
        cells = [replicate.cells[key] for replicate in series.replicates if key in replicate.cells]
        complete = [self.sums(cell) for cell in cells if not interrupted(cell, series)]
        return tuple(fmean(values) for values in zip(*complete, strict=True))
