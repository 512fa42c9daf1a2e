"""Tables by length in the papers' layout: labels down, lengths across, the papers' rows below ours."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_coca.evaluation.report.document import NOTHING, Entry, Line, Table
from megatron_coca.evaluation.report.grouping import Group, Series
from megatron_coca.evaluation.report.published import TABLES, PublishedTable, use_of
from megatron_coca.evaluation.results import Missing

SHOWN = {"refused": "refused", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""How a table names why a cell is missing."""

THEIRS = "numbers of another model and other data than ours, for orientation"


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number of a table; infinite ones are `inf`."""
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def lacking(missing: Missing) -> Entry:
    """A cell that was not measured, with the reason."""
    return Entry(SHOWN[missing.kind], note=missing.reason, absent=True)


def marked(lines: Sequence[Line], lowest: bool) -> tuple[Line, ...]:
    """The lines with the best finite value of each column marked, where it has at least two that may be compared."""
    best: dict[int, float] = {}
    for place in range(len(lines[0].entries) if lines else 0):
        values = [_compared(line.entries[place]) for line in lines]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if len(finite) > 1 and len(set(finite)) > 1:
            best[place] = min(finite) if lowest else max(finite)
    return tuple(replace(line, entries=_marked(line.entries, best)) for line in lines)


def _marked(entries: Sequence[Entry], best: dict[int, float]) -> tuple[Entry, ...]:
    return tuple(
        replace(entry, best=True) if place in best and _compared(entry) == best[place] else entry
        for place, entry in enumerate(entries)
    )


def _compared(entry: Entry) -> float | None:
    return None if entry.partial else entry.value


def training_lengths(group: Group[Any]) -> set[int]:
    """Of all models of a group."""
    return {series.header.checkpoint.seq_length for series in group.series}


def starred(lengths: Iterable[int], trained: set[int]) -> tuple[str, ...]:
    """Column heads; training lengths have an asterisk."""
    return tuple(f"{length}*" if length in trained else str(length) for length in lengths)


def length_table(
    name: str,
    caption: str,
    head: str,
    group: Group[Any],
    entry: Callable[[Series[Any], int], Entry],
    lengths: Sequence[int],
    metric: str,
    papers: bool,
    lowest: bool = True,
) -> list[Table]:
    """Ours by length, with the papers' rows of the same training length; then papers' tables of other settings.

    `entry` is the cell of a series at a length.
    """
    trained = training_lengths(group)
    joined, apart = beside(group, metric) if papers else ([], [])
    columns = sorted(set(lengths) | {length for table in joined for length in table.columns if isinstance(length, int)})
    ours = [Line(each.label, tuple(entry(each, length) for length in columns)) for each in group.series]
    lines = [*marked(ours, lowest), *(line for table in joined for line in published_lines(table, columns, group))]
    notes = [f"* training length ({', '.join(map(str, sorted(trained)))})"] if trained & set(columns) else []
    sources = tuple(f"{table.name}: {table.setting}; {THEIRS}." for table in joined)
    main = Table(name, caption, (head, *starred(columns, trained)), tuple(lines), tuple(notes), sources)
    return [main, *(published_table(table, group, name) for table in apart)]


def beside(group: Group[Any], metric: str) -> tuple[list[PublishedTable], list[PublishedTable]]:
    """The papers' tables of a metric: of the training length of ours, and others that have something of ours."""
    trained = training_lengths(group)
    uses = [use for series in group.series if (use := use_of(series.header)) is not None]
    wanted = [table for table in TABLES if table.metric == metric and table.wanted(trained, uses)]
    joined = [table for table in wanted if table.training_length in trained]
    return joined, [table for table in wanted if table.training_length not in trained]


def published_lines(table: PublishedTable, columns: Sequence[int | str], group: Group[Any] | None) -> list[Line]:
    """Rows of a paper in our columns; the small print names ours of the same method."""
    lines = []
    for row in table.rows:
        values = dict(zip(table.columns, row.values, strict=True))
        alike = [series.label for series in (group.series if group is not None else ()) if row.is_of(series.header)]
        detail = f"the method of: {', '.join(alike)}" if alike else ""
        cells = tuple(Entry(values[column]) if column in values else NOTHING for column in columns)
        lines.append(Line(row.name, cells, f"{table.source}, {table.name}", detail))
    return lines


def published_table(table: PublishedTable, group: Group[Any] | None, beside_name: str) -> Table:
    """A paper's table on its own."""
    name = "-".join([beside_name, *"".join(c if c.isalnum() else " " for c in table.name.lower()).split()])
    caption = f"Published, {table.source}: {table.name}"
    header = ("method", *map(str, table.columns))
    remark = f"; {THEIRS}" if table.measured else ""
    notes = (f"{table.setting[0].upper()}{table.setting[1:]}{remark}.",)
    return Table(name, caption, header, tuple(published_lines(table, table.columns, group)), notes)
