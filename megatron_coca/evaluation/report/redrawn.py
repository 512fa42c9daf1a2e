"""Figures and tables from the rows of results.csv, with the looks and the statistics of the report.

rows = read_rows("results.csv")
figure(rows, "recall", "accuracy")                 # a plot, which Jupyter shows
frame(table(rows, "recall", "accuracy"))           # a pandas table
print(latex_table(table(rows, "recall", "accuracy")))
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.report.document import EMPTY, Table, TableCell, TableRow
from megatron_coca.evaluation.report.latex import latex_table
from megatron_coca.evaluation.report.metrics import mean_cell
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.looks import Member, apart, look_of
from megatron_coca.evaluation.report.plots.panels import Line, Panel, arranged, axis_of, panels
from megatron_coca.evaluation.report.result_tables import mark_best
from megatron_coca.evaluation.report.tidy import COLUMNS, TidyRow, read_rows
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks import TASKS

__all__ = ["figure", "frame", "latex_table", "measured", "read_frame", "read_rows", "table"]


COUNTS, NUMBERS = ("seed", "length", "trained"), ("value", "low", "high")
"""The columns of results.csv with whole numbers and with other numbers. All other columns are text."""


def read_frame(path: str | Path) -> pd.DataFrame:
    """Read results.csv as a pandas table that keeps every label as it is written.

    `pandas.read_csv` by itself turns the labels NA, None and null into missing values, and 007 into the number 7.
    """
    found = pd.DataFrame([asdict(row) for row in read_rows(path)], columns=list(COLUMNS))
    return found.astype(dict.fromkeys(COUNTS, "Int64") | dict.fromkeys(NUMBERS, "float64"))


def number_of(task: str, metric: str) -> Number:
    """Return the declaration of a metric of results.csv. Scores of lm-evaluation-harness have none, so make one."""
    declared = TASKS.get(task.partition(" (")[0])  # without the text that distinguishes groups
    found = None if declared is None else declared.number(metric)
    return found or Number(metric, share="accuracy" in metric)


def measured(rows: Sequence[TidyRow]) -> list[tuple[str, str]]:
    """Return the task and metric of every number that was measured at two lengths or more, in the order of the rows."""
    lengths: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row.length is not None:
            lengths.setdefault((row.task, row.metric), set()).add(row.length)
    return [key for key, found in lengths.items() if len(found) > 1]


def cells(rows: Sequence[TidyRow], task: str, metric: str) -> dict[str, dict[int, TableCell]]:
    """Return a cell for each label and length: the number of a single seed, or the mean over seeds with its t interval.

    Raises EvaluationError if the metric has no numbers by length.
    """
    values: dict[str, dict[int, list[TidyRow]]] = {}
    for row in rows:
        if (row.task, row.metric) == (task, metric) and row.length is not None:
            values.setdefault(row.label, {}).setdefault(row.length, []).append(row)
    if not values:
        known = ", ".join(f"{task} {metric}" for task, metric in dict.fromkeys((row.task, row.metric) for row in rows))
        raise EvaluationError(f"{task} {metric}: has no numbers by length; name one of {known}")
    log = number_of(task, metric).logarithm is not None
    return {
        label: {length: _cell(found, log) for length, found in sorted(lengths.items())}
        for label, lengths in values.items()
    }


def _cell(found: Sequence[TidyRow], log: bool) -> TableCell:
    if len(found) == 1 and found[0].low is not None and found[0].high is not None:
        (row,) = found
        return TableCell(f"{row.value:.2f}", row.value, f"{row.low:.2f}–{row.high:.2f}", row.low, row.high, 1)
    values = [row.value for row in found]
    return mean_cell([math.log(value) for value in values] if log else values, log=log)


def members_of(rows: Sequence[TidyRow]) -> dict[str, Member]:
    """Return the `Member` of each label in the rows of a report."""
    families: dict[str, dict[str, Member]] = {}
    for row in rows:
        member = Member(row.label, row.weights, row.variant, look_of(row.method), row.method)
        families.setdefault(row.weights, {}).setdefault(row.label, member)
    return {
        member.label: member
        for family in families.values()
        for member in apart(sorted(family.values(), key=lambda member: bool(member.variant)))
    }


def figure(rows: Sequence[TidyRow], task: str, metric: str) -> Figure:
    """Return the plot of one metric of a task against length."""
    lines = []
    for label, by_length in cells(rows, task, metric).items():
        known = {length: cell for length, cell in by_length.items() if cell.value is not None}
        ends = [
            tuple(math.nan if (end := getattr(cell, name)) is None else end for cell in known.values())
            for name in ("value", "low", "high")
        ]
        bands = ends[1:] if any(map(math.isfinite, ends[1])) else ((), ())
        lines.append(Line(label, tuple(map(float, known)), ends[0], *bands))
    number = number_of(task, metric)
    trained = sorted({row.trained for row in rows if row.task == task and row.trained is not None})
    marks = {float(length): f"trained at {length:,}" for length in trained}
    panel = Panel((), "length (tokens)", number.quantity or metric, marks=marks, **axis_of(number))
    shown = arranged(lines, members_of(rows), panel)
    title = f"{task}: {metric} by length"
    return Figure(f"{task}-{metric}", title, title, *panels(shown))


def table(rows: Sequence[TidyRow], task: str, metric: str) -> Table:
    """Return the numbers of one metric of a task, with the best in bold if it differs significantly from the others."""
    found = cells(rows, task, metric)
    lengths = sorted({length for by_length in found.values() for length in by_length})
    lines = [
        TableRow(label, tuple(by_length.get(length, EMPTY) for length in lengths)) for label, by_length in found.items()
    ]
    best = number_of(task, metric).best
    shown = tuple(lines if best == "neither" else mark_best(lines, best == "lowest"))
    return Table(f"{task}-{metric}", f"{task}: {metric} by length", ("label", *map(str, lengths)), shown)


def frame(shown: Table) -> pd.DataFrame:
    """Return a table as a pandas table with the text of its cells."""
    texts = [[cell.in_full for cell in row.cells] for row in shown.rows]
    return pd.DataFrame(texts, index=[row.name for row in shown.rows], columns=list(shown.header[1:]))
