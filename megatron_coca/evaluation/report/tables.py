"""Tables and captions that the sections of a report share: labels down, lengths across, published rows below ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_coca.evaluation.report.charts import MOST_BEYOND, Figure, Line, Panel, height, panels
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.intervals import estimate, geometric_estimate
from megatron_coca.evaluation.report.published import TABLES, PublishedTable, method_key
from megatron_coca.evaluation.report.reading import (
    Comparable,
    LoadedResult,
    Replicate,
    ResultGroup,
    Series,
    group_results,
)
from megatron_coca.evaluation.results import Missing, Result

HASH_DIGITS = 12
"""Digits of a hash that are shown; report.json has them all."""
MAX_LISTED = 4
DASHED = " Dashed with hollow marks: the CoCA paper's numbers."
MISSING_TEXT = {"refused": "refused", "out of memory": "OOM", "not run": "not run", "failed": "failed"}
"""Table text for each kind of missing cell."""
Show = Callable[[float], str]
TWO_DIGITS: Show = "{:.2f}".format
MOST_LINES = 8
"""Labels above which a plot by length has one panel for each set of weights."""
THEIRS = "numbers of another model and other data than ours, for orientation"


@dataclass(frozen=True)
class ReportOptions:
    """What is shown beside results: published numbers, learning curves by label, comparison with a baseline's label."""

    papers: bool = True
    baseline: str | None = None
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)


Builder = Callable[[Sequence[LoadedResult], ReportOptions], list[ReportBlock]]
"""Makes the blocks of a section out of results; none leaves the section out."""
CellFunction = Callable[[Series, int], TableCell]
BlockFunction = Callable[[ResultGroup, str, ReportOptions], ReportBlock]


def grouped(
    name: str, comparable: Comparable, applies: Callable[[ResultGroup], bool] = lambda group: True
) -> Callable[[BlockFunction], Builder]:
    """Decorate a function of one group: called with each group of comparable results, named `name`-1 and so on."""

    def decorate(block: BlockFunction) -> Builder:
        def build(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
            groups = filter(applies, group_results(loaded, comparable))
            return [
                replace(block(group, f"{name}-{index}", options), heading=group.heading)
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


def weights_text(series: Series) -> str:
    others = len(series.replicates) - 1
    more = f" and those of {others} more seed{'' if others == 1 else 's'}" if others else ""
    return checkpoint_text(series.header) + more


def origin_text(group: ResultGroup) -> str:
    headers = [series.header for series in group.series]
    checkpoints = listed(map(weights_text, group.series))
    computed = listed(environment_text(header) for header in headers if header.environment.backend)
    return f"Checkpoints: {checkpoints}. {data_text(group.first)}Computed with {computed or 'nothing'}."


def series_origin_text(series: Series) -> str:
    header = series.header
    return f"Checkpoint: {weights_text(series)}. {data_text(header)}Computed with {environment_text(header)}."


def missing_cell(missing: Missing) -> TableCell:
    return TableCell(MISSING_TEXT[missing.kind], note=missing.reason, absent=True)


def mean_cell(values: Sequence[float], show: Show = TWO_DIGITS, seeds: int = 1, log: bool = False) -> TableCell:
    """The mean of `values`, of which there are at most as many as `seeds`, with its 95% t interval.

    `log` is for logarithms: their mean and the ends of its interval are shown as exponentials.
    """
    found = (geometric_estimate if log else estimate)(values)
    cell = TableCell(show(found.mean), found.mean)
    if seeds == 1:
        return cell
    detail = [] if math.isnan(found.low) else [f"{show(found.low)}–{show(found.high)}"]
    if detail and not log:
        detail = [f"± {show(found.high - found.mean)}"]
    detail += [f"n = {found.count}"] if found.count < seeds else []
    low, high = (None, None) if math.isnan(found.low) else (found.low, found.high)
    return replace(cell, detail=", ".join(detail), low=low, high=high, seeds=found.count)


def value_cell(
    series: Series,
    at: str,
    number: Callable[[Replicate], float | None],
    show: Show = TWO_DIGITS,
    log: bool = False,
    single: Callable[[Replicate], Mapping[str, Any]] = lambda replicate: {},
) -> TableCell:
    """The `mean_cell` over the replicates of a series; of one replicate the number, with the fields by `single`.

    `number` is None where a replicate has none; `at` is the name of the cell among those that are missing.
    """
    numbers = [number(replicate) for replicate in series.replicates]
    known = [value for value in numbers if value is not None]
    if not known:
        reasons = [replicate.why(at) for replicate in series.replicates]
        return missing_cell(next((missing for missing in reasons if missing.kind != "not run"), reasons[0]))
    cell = mean_cell(known, show, len(numbers), log)
    if len(numbers) == 1:
        return replace(cell, **single(series.replicates[0]))
    without = [
        (replicate.header.checkpoint.seed, replicate.why(at))
        for replicate, value in zip(series.replicates, numbers, strict=True)
        if value is None
    ]
    reasons_by_seed = [f"seed {seed}: {': '.join(filter(None, (why.kind, why.reason)))}" for seed, why in without]
    note = f"{len(known)} of {len(numbers)} seeds; {'; '.join(reasons_by_seed)}" if without else ""
    return replace(cell, note=note)


SEEDS_NOTE = (
    "Of several seeds: the mean and half of its 95% t interval over seeds (±); for perplexities and their ratios exp "
    "of the mean of the logarithm over seeds, with the ends of its 95% t interval. n: seeds with a number, where fewer."
)


def with_seeds_note(table: Table) -> Table:
    averaged = any(cell.seeds is not None for row in table.rows for cell in row.cells)
    return replace(table, notes=(*table.notes, SEEDS_NOTE)) if averaged else table


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
    cell: CellFunction,
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


def cell_line(label: str, cells: Mapping[int, TableCell]) -> Line:
    """The numbers of table cells by length, with their intervals."""
    y, low, high = (
        tuple(math.nan if value is None else value for value in values)
        for values in zip(*((cell.value, cell.low, cell.high) for cell in cells.values()), strict=True)
    )
    banded = any(map(math.isfinite, low))
    return Line(label, tuple(cells), y, low if banded else (), high if banded else ())


def length_lines(group: ResultGroup, cell: CellFunction) -> tuple[list[Series], list[Line]]:
    """The series with complete numbers, and a line with the numbers and intervals of the table for each."""
    drawn, lines = [], []
    for series in group.series:
        cells = {length: cell(series, length) for length in group.lengths()}
        known = {length: found for length, found in cells.items() if found.value is not None and not found.partial}
        if known:
            drawn.append(series)
            lines.append(cell_line(series.label, known))
    return drawn, lines


def bands_text(drawn: Sequence[Series], cut_off: bool = False) -> str:
    if all(len(series.replicates) == 1 for series in drawn):
        return ""
    return (
        f" Bands: 95% t intervals over seeds{f', cut off {MOST_BEYOND:g} times beyond the lines' if cut_off else ''}."
    )


def length_figure(
    name: str, what: str, drawn: Sequence[Series], lines: Sequence[Line], panel: Mapping[str, Any], caption: str
) -> Figure:
    """Lines against length with the training lengths marked; `what` they show, and other fields of the panel.

    The first lines are those of `drawn`. More than MOST_LINES of them are drawn in a panel for each set of weights.
    """
    lengths = sorted({series.header.checkpoint.seq_length for series in drawn})
    trained = {float(length): f"training length {length}" for length in lengths}
    alt = f"{what} for {', '.join(series.label for series in drawn)}; the table has the numbers"
    weights = [tuple(replicate.header.checkpoint.identity for replicate in series.replicates) for series in drawn]
    if len(drawn) <= MOST_LINES or len(set(weights)) == 1:
        shown = panels([Panel(tuple(lines), marks=trained, **panel)])
        return Figure(name, caption, alt, shown, (6.0, height(len(lines) + len(trained))))
    by_weights: dict[Any, list[Line]] = {}
    for identities, line in zip(weights, lines, strict=False):
        by_weights.setdefault(identities, []).append(line)
    titles = [min((line.label for line in own), key=len) for own in by_weights.values()]
    short = [
        [replace(line, label=line.label.removeprefix(title).strip() or "plain") for line in own]
        for title, own in zip(titles, by_weights.values(), strict=True)
    ]
    styles = {label: index for index, label in enumerate(dict.fromkeys(line.label for own in short for line in own))}
    grid = [
        Panel(tuple(replace(line, style=styles[line.label]) for line in own), title=title, marks=trained, **panel)
        for title, own in zip(titles, short, strict=True)
    ]
    size = (9.0, 2.6 * math.ceil(len(grid) / 3) + height(len(styles) + len(trained), 0.2, 3))
    return Figure(name, caption, alt, panels(grid, columns=3), size)


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


def published_lines(group: ResultGroup, drawn: Sequence[Series], metric: str) -> list[Line]:
    """A line for each published row with the method and training length of one of the `drawn` series."""
    lines: list[Line] = []
    for table in matching_tables(group, metric)[0]:
        for row in table.rows:
            like = next((at for at, series in enumerate(drawn) if row.is_method_of(series.header)), None)
            if like is not None:
                values = tuple(math.nan if value == "OOM" else float(value) for value in row.values)
                lengths = tuple(map(float, published_lengths([table])))
                lines.append(Line(f"paper: {row.name}", lengths, values, like=like))
    return lines if len(drawn) <= MOST_LINES else []
