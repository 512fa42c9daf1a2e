"""Tables and captions that the sections of a report share: labels down, lengths across, published rows below ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_coca.evaluation.report.charts import MOST_BEYOND, Figure, Line, Panel, panels, size_with_legend
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.intervals import Estimate, differ, difference_interval
from megatron_coca.evaluation.report.metrics import Metric, Show, mean_cell
from megatron_coca.evaluation.report.published import PublishedTable, method_key, tables_of
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, group_results
from megatron_coca.evaluation.results import Result

HASH_DIGITS = 12
"""Digits of a hash that are shown; report.json has them all."""
DASHED = " Dashed with hollow marks: the CoCA paper's numbers."
MOST_LINES = 7
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
BlockFunction = Callable[[ResultGroup, str, ReportOptions], ReportBlock]


def grouped(
    name: str, comparable: Comparable, applies: Callable[[ResultGroup], bool] = lambda group: True
) -> Callable[[BlockFunction], Builder]:
    """Decorate a function that makes the block of one group of comparable results, named `name`-1 and so on."""

    def decorate(block: BlockFunction) -> Builder:
        def build(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
            groups = filter(applies, group_results(loaded, comparable))
            return [
                replace(block(group, f"{name}-{index}", options), heading=group.heading, provenance=provenance(group))
                for index, group in enumerate(groups, 1)
            ]

        return build

    return decorate


def checkpoint_text(result: Result) -> str:
    checkpoint = result.checkpoint
    numbers = {"step": checkpoint.step, "seed": checkpoint.seed}
    known = "".join(f", {name} {number}" for name, number in numbers.items() if number is not None)
    return f"{checkpoint.path}{known} (weights {checkpoint.identity[:HASH_DIGITS]})"


def environment_text(result: Result) -> str:
    environment = result.environment
    return f"{environment.dtype}, {environment.backend or 'no backend'}, {environment.device}"


def data_text(result: Any) -> str:
    """The data with the first digits of its hash; empty for a task without documents or haystack."""
    if (documents := getattr(result, "documents", None)) is not None:
        size = f"{documents.count} documents, {documents.tokens:,} tokens"
        return f"data: {', '.join(documents.sources)} (sha256 {documents.sha256[:HASH_DIGITS]}; {size})"
    if (haystack := getattr(result.protocol, "haystack", None)) is not None:
        return f"data: {haystack.name} (sha256 {haystack.sha256[:HASH_DIGITS]})"
    return ""


def provenance(group: ResultGroup) -> tuple[str, ...]:
    """Checkpoints with the labels that they are measured as, the data, and where it was computed."""
    labels: dict[str, list[str]] = {}
    headers = [replicate.header for series in group.series for replicate in series.replicates]
    for header in headers:
        labels.setdefault(checkpoint_text(header), []).append(header.label)
    checkpoints = [f"{checkpoint}: {', '.join(measured)}" for checkpoint, measured in labels.items()]
    computed = dict.fromkeys(
        f"{environment_text(header)}, torch {header.environment.torch}, tokenizer "
        f"{(header.tokenizer or 'none')[:HASH_DIGITS]}"
        for header in headers
        if header.environment.backend
    )
    return *checkpoints, *filter(None, [data_text(group.first)]), *(f"computed with {device}" for device in computed)


PAIRED_NOTE = (
    "A variant and the plain model of the same weights, seed by seed: the mean of these {} and its 95% t interval over "
    "seeds. What the seeds have in common cancels."
)


def paired_tables(name: str, caption: str, group: ResultGroup, metric: Metric, show: Show) -> list[Table]:
    """What every variant changes by length, paired by the weights that it shares with a plain model; none without two
    seeds. Of logarithms ratios are shown.
    """
    by_weights = [{each.header.checkpoint.identity: each for each in series.replicates} for series in group.series]
    lengths, rows = group.lengths(), []
    for series, own in zip(group.series, by_weights, strict=True):
        for plain, others in zip(group.series, by_weights, strict=True):
            common = [identity for identity in own if identity in others]
            if plain.header.overrides or not series.header.overrides or len(common) < 2:
                continue
            cells = []
            for length in lengths:
                pairs = [(metric.of(own[each], length), metric.of(others[each], length)) for each in common]
                changes = [one - other for one, other in pairs if one is not None and other is not None]
                finite = [change for change in changes if math.isfinite(change)]
                cells.append(mean_cell(finite, show, metric.log) if len(finite) > 1 else EMPTY)
            rows.append(TableRow(f"{series.label} against {plain.label}", tuple(cells)))
    header = ("at length", *length_header(lengths, group.training_lengths()))
    notes = (PAIRED_NOTE.format("ratios" if metric.log else "differences"),)
    return [Table(f"{name}-paired", caption, header, tuple(rows), notes)] if rows else []


SEEDS_NOTE = (
    "Of several seeds: the mean, and half of its 95% t interval over seeds (±); of perplexities and their ratios the "
    "exponential of the mean logarithm, and the ends of its interval. n: seeds, where fewer than in other cells."
)


def with_seeds_note(table: Table) -> Table:
    """A table of which some numbers are of several seeds: with a note, and n where a number is of fewer."""
    most = max((cell.seeds or 0 for row in table.rows for cell in row.cells), default=0)
    if most < 2:
        return table

    def counted(cell: TableCell) -> TableCell:
        if not cell.seeds or cell.seeds == most:
            return cell
        return replace(cell, detail=", ".join(filter(None, (cell.detail, f"n = {cell.seeds}"))))

    rows = tuple(replace(row, cells=tuple(map(counted, row.cells))) for row in table.rows)
    return replace(table, rows=rows, notes=(*table.notes, SEEDS_NOTE))


def differ_surely(one: TableCell, other: TableCell) -> bool:
    """True if two numbers differ by more than their uncertainty: by both intervals, without them by the documents."""
    ends = [(cell.value, cell.low, cell.high) for cell in (one, other)]
    if any(end is None for three in ends for end in three):
        return differ(one.sample, other.sample)
    estimates = (Estimate(*three, 1) for three in ends)  # type: ignore[arg-type]
    low, high = difference_interval(*estimates)
    return low > 0 or high < 0


def mark_best(rows: Sequence[TableRow], lowest: bool | Sequence[bool]) -> list[TableRow]:
    """Marks the best finite value of each column if it surely differs from every other one.

    `lowest` says whether the smallest is the best, for all columns or for each.
    """
    columns = []
    for index, cells in enumerate(zip(*(row.cells for row in rows), strict=True)):
        found = [(cell.value, cell) for cell in cells if cell.value is not None and not cell.partial]
        known = [(value, cell) for value, cell in found if math.isfinite(value)]
        smallest = lowest if isinstance(lowest, bool) else lowest[index]
        _, best = (min if smallest else max)(known, key=lambda pair: pair[0], default=(0.0, EMPTY))
        others = [cell for _, cell in known if cell is not best]
        sure = bool(others) and all(differ_surely(best, cell) for cell in others)
        columns.append([replace(cell, best=sure and cell is best) for cell in cells])
    by_row = zip(*columns, strict=True) if columns else [()] * len(rows)
    return [replace(row, cells=tuple(cells)) for row, cells in zip(rows, by_row, strict=True)]


def length_header(lengths: Iterable[int], trained: set[int]) -> tuple[str, ...]:
    return tuple(f"{length}*" if length in trained else str(length) for length in lengths)


def length_table(
    name: str,
    caption: str,
    head: str,
    group: ResultGroup,
    metric: Metric,
    published: str = "",
    reference: Series | None = None,
) -> list[Table]:
    """Ours by length with the published rows of the same training length; then published tables of other settings.

    `published` is the metric of published tables, none if empty; numbers are compared with those of `reference`.
    """
    trained = group.training_lengths()
    joined, apart = matching_tables(group, published)
    lengths = sorted({*group.lengths(), *published_lengths(joined)})
    rows = mark_best(
        [
            TableRow(series.label, tuple(metric.cell(series, length, reference=reference) for length in lengths))
            for series in group.series
        ],
        metric.lowest,
    )
    for table in joined:
        rows += published_rows(table, lengths, group)
    notes = (f"* training length ({', '.join(map(str, sorted(trained)))})",) if trained & set(lengths) else ()
    header = (head, *length_header(lengths, trained))
    main = Table(name, caption, header, tuple(rows), notes, tuple(map(source_text, joined)))
    return [main, *(published_table(table, group, name) for table in apart)]


def length_lines(group: ResultGroup, cell: Callable[[Series, int], TableCell]) -> tuple[list[Series], list[Line]]:
    """Return the series that have complete numbers, and for each a line with the numbers and intervals of the table."""
    drawn, lines = [], []
    for series in group.series:
        cells = {length: cell(series, length) for length in group.lengths()}
        known = {length: found for length, found in cells.items() if found.value is not None and not found.partial}
        if known:
            drawn.append(series)
            y, low, high = (
                tuple(math.nan if (value := getattr(found, end)) is None else value for found in known.values())
                for end in ("value", "low", "high")
            )
            banded = any(map(math.isfinite, low))
            lines.append(Line(series.label, tuple(known), y, low if banded else (), high if banded else ()))
    return drawn, lines


def bands_text(drawn: Sequence[Series], cut_off: bool = False) -> str:
    if all(len(series.replicates) == 1 for series in drawn):
        return ""
    beyond = f", cut off {MOST_BEYOND:g} times beyond the lines" if cut_off else ""
    return f" Bands and bars: 95% t intervals over seeds{beyond}."


def length_figure(
    name: str, what: str, drawn: Sequence[Series], lines: Sequence[Line], panel: Mapping[str, Any], caption: str
) -> list[Figure]:
    """Lines against length with the training lengths marked; `what` they show, and other fields of the panel.

    The first lines are those of `drawn`. More than MOST_LINES of them are drawn in a panel for each set of weights, if
    these are fewer than the lines. None with a single length, where there is nothing to draw a line through.
    """
    if len({x for line in lines for x in line.x}) < 2:
        return []
    lengths = sorted({series.header.checkpoint.seq_length for series in drawn})
    trained = {float(length): f"training length {length}" for length in lengths}
    alt = f"{what} for {', '.join(series.label for series in drawn)}; the table has the numbers"
    weights = [tuple(replicate.header.checkpoint.identity for replicate in series.replicates) for series in drawn]
    if len(drawn) <= MOST_LINES or len(set(weights)) in (1, len(drawn)):
        shown = panels([Panel(tuple(lines), marks=trained, **panel)])
        size = size_with_legend([*(line.label for line in lines), *trained.values()])
        return [Figure(name, caption, alt, shown, size)]
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
    columns = min(3, len(grid))
    size = size_with_legend([*styles, *trained.values()], 2.8 * math.ceil(len(grid) / columns), 9.0)
    return [Figure(name, caption, alt, panels(grid, columns), size)]


def matching_tables(group: ResultGroup, metric: str) -> tuple[list[PublishedTable], list[PublishedTable]]:
    trained = group.training_lengths()
    methods = [key for series in group.series if (key := method_key(series.header)) is not None]
    shown = [table for table in tables_of(metric) if table.is_shown_with(trained, methods)]
    joined = [table for table in shown if table.training_length in trained and not table.apart]
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
                lengths = tuple(map(float, published_lengths([table])))
                lines.append(Line(f"paper: {row.name}", lengths, row.numbers, like=like))
    return lines if len(drawn) <= MOST_LINES and len(group.lengths()) > 1 else []
