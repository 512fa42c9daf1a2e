"""Tables and captions that the sections of a report share: labels down, lengths across, published rows below ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_coca.evaluation.report.charts import Curve, Figure, Panel, height, panels
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.published import TABLES, PublishedTable, method_key
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, group_results
from megatron_coca.evaluation.results import Missing, Result

HASH_DIGITS = 12
"""Digits of a hash that are shown; report.json has them all."""
MAX_LISTED = 4
MISSING_TEXT = {"refused": "refused", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""Table text for each kind of missing cell."""
THEIRS = "numbers of another model and other data than ours, for orientation"


Builder = Callable[[Sequence[LoadedResult], bool], list[ReportBlock]]
"""Makes the blocks of a section out of results, with published numbers or without; none leaves the section out."""
BlockFunction = Callable[[ResultGroup, str, bool], ReportBlock]


def grouped(
    name: str, comparable: Comparable, applies: Callable[[ResultGroup], bool] = lambda group: True
) -> Callable[[BlockFunction], Builder]:
    """Decorate a function of one group: called with each group of comparable results, named `name`-1 and so on."""

    def decorate(block: BlockFunction) -> Builder:
        def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
            groups = filter(applies, group_results(loaded, comparable))
            return [
                replace(block(group, f"{name}-{index}", papers), heading=group.heading)
                for index, group in enumerate(groups, 1)
            ]

        return build

    return decorate


def listed(texts: Iterable[str]) -> str:
    known = list(dict.fromkeys(texts))
    more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
    return ", ".join(known[:MAX_LISTED]) + more


def checkpoint_text(result: Result) -> str:
    checkpoint = result.checkpoint
    step = f", step {checkpoint.step}" if checkpoint.step is not None else ""
    return f"{checkpoint.path}{step} (weights {checkpoint.identity[:HASH_DIGITS]})"


def environment_text(result: Result) -> str:
    environment = result.environment
    return f"{environment.dtype}, {environment.backend or 'no backend'}, {environment.device}"


def data_text(result: Any) -> str:
    """The data with the first digits of its hash; empty for a task without documents or haystack."""
    if (documents := getattr(result, "documents", None)) is not None:
        size = f"{documents.count} documents, {documents.tokens:,} tokens"
        return f"Data: {listed(documents.sources)} (sha256 {documents.sha256[:HASH_DIGITS]}; {size}). "
    if (haystack := getattr(result.protocol, "haystack", None)) is not None:
        return f"Data: {haystack.name} (sha256 {haystack.sha256[:HASH_DIGITS]}). "
    return ""


def origin_text(group: ResultGroup) -> str:
    headers = [series.header for series in group.series]
    checkpoints = listed(map(checkpoint_text, headers))
    computed = listed(environment_text(header) for header in headers if header.environment.backend)
    return f"Checkpoints: {checkpoints}. {data_text(group.first)}Computed with {computed or 'nothing'}."


def series_origin_text(series: Series) -> str:
    header = series.header
    return f"Checkpoint: {checkpoint_text(header)}. {data_text(header)}Computed with {environment_text(header)}."


def number_cell(value: float, format_spec: str = ".2f", scale: float = 1.0, detail: str = "") -> TableCell:
    return TableCell(format(scale * value, format_spec), value, detail)


def missing_cell(missing: Missing) -> TableCell:
    return TableCell(MISSING_TEXT[missing.kind], note=missing.reason, absent=True)


def mark_best(rows: Sequence[TableRow], lowest: bool | Sequence[bool]) -> list[TableRow]:
    """Marks the best finite value of each column that has at least two different comparable ones.

    `lowest` says whether the smallest is the best, for all columns or for each.
    """
    columns = []
    for index, cells in enumerate(zip(*(row.cells for row in rows), strict=True)):
        values = [math.nan if cell.value is None or cell.partial else cell.value for cell in cells]
        finite = {value for value in values if math.isfinite(value)}
        smallest = lowest if isinstance(lowest, bool) else lowest[index]
        best = (min if smallest else max)(finite) if len(finite) > 1 else None
        columns.append([replace(cell, best=value == best) for cell, value in zip(cells, values, strict=True)])
    by_row = zip(*columns, strict=True) if columns else [()] * len(rows)
    return [replace(row, cells=tuple(cells)) for row, cells in zip(rows, by_row, strict=True)]


def length_header(lengths: Iterable[int], trained: set[int]) -> tuple[str, ...]:
    return tuple(f"{length}*" if length in trained else str(length) for length in lengths)


def length_table(
    name: str,
    caption: str,
    head: str,
    group: ResultGroup,
    cell: Callable[[Series, int], TableCell],
    metric: str,
    lowest: bool,
) -> list[Table]:
    """Ours by length with the published rows of the same training length; then published tables of other settings.

    `cell` is the cell of a series at a length; `metric` selects published tables, none if empty.
    """
    trained = group.training_lengths()
    joined, apart = matching_tables(group, metric)
    lengths = sorted({*group.lengths(), *published_lengths(joined)})
    rows = mark_best(
        [TableRow(series.label, tuple(cell(series, length) for length in lengths)) for series in group.series], lowest
    )
    for table in joined:
        rows += published_rows(table, lengths, group)
    notes = (f"* training length ({', '.join(map(str, sorted(trained)))})",) if trained & set(lengths) else ()
    header = (head, *length_header(lengths, trained))
    main = Table(name, caption, header, tuple(rows), notes, tuple(map(source_text, joined)))
    return [main, *(published_table(table, group, name) for table in apart)]


def length_figure(
    name: str, what: str, group: ResultGroup, curves: Sequence[Curve], panel: Mapping[str, Any], caption: str
) -> Figure:
    """Curves against length with the training lengths marked; `what` they show, and other fields of the panel."""
    trained = {float(length): f"training length {length}" for length in sorted(group.training_lengths())}
    labels = ", ".join(curve.label for curve in curves if curve.like is None)
    return Figure(
        name,
        caption,
        f"{what} for {labels}; the table has the numbers",
        panels([Panel(curves=tuple(curves), marks=trained, **panel)]),
        (6.0, height(len(curves) + len(trained))),
    )


def matching_tables(group: ResultGroup, metric: str) -> tuple[list[PublishedTable], list[PublishedTable]]:
    trained = group.training_lengths()
    methods = [key for series in group.series if (key := method_key(series.header)) is not None]
    shown = [table for table in TABLES if table.metric == metric and table.is_shown_with(trained, methods)]
    joined = [table for table in shown if table.training_length in trained]
    return joined, [table for table in shown if table not in joined]


def published_lengths(tables: Iterable[PublishedTable]) -> list[int]:
    return [column for table in tables for column in table.columns if isinstance(column, int)]


def source_text(table: PublishedTable) -> str:
    return f"{table.name}: {table.setting}; {THEIRS}."


def published_rows(
    table: PublishedTable, columns: Sequence[int | str], group: ResultGroup | None = None
) -> list[TableRow]:
    """Published rows in our columns; the small print names our labels in `group` with the same method."""
    rows = []
    for row in table.rows:
        values = dict(zip(table.columns, row.values, strict=True))
        same = [series.label for series in (group.series if group else ()) if row.is_method_of(series.header)]
        cells = tuple(TableCell(values[column]) if column in values else EMPTY for column in columns)
        detail = f"the method of: {', '.join(same)}" if same else ""
        rows.append(TableRow(row.name, cells, f"{table.source}, {table.name}", detail))
    return rows


def published_table(table: PublishedTable, group: ResultGroup | None, prefix: str) -> Table:
    """A published table on its own; `prefix` begins its name."""
    words = "".join(character if character.isalnum() else " " for character in table.name.lower()).split()
    caption = f"Published, {table.source}: {table.name}"
    header = ("method", *map(str, table.columns))
    remark = f"; {THEIRS}" if table.measured else ""
    notes = (f"{table.setting[0].upper()}{table.setting[1:]}{remark}.",)
    return Table("-".join([prefix, *words]), caption, header, tuple(published_rows(table, table.columns, group)), notes)


def published_curves(group: ResultGroup, drawn: Sequence[Series], metric: str) -> list[Curve]:
    """A curve for each published row with the method and training length of one of the `drawn` series."""
    curves = []
    for table in matching_tables(group, metric)[0]:
        for row in table.rows:
            like = next((at for at, series in enumerate(drawn) if row.is_method_of(series.header)), None)
            if like is not None:
                values = tuple(math.nan if value == "OOM" else float(value) for value in row.values)
                lengths = tuple(map(float, published_lengths([table])))
                curves.append(Curve(f"paper: {row.name}", lengths, values, like=like))
    return curves
