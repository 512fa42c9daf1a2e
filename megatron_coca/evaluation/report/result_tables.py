"""Tables and plots shared by report sections: one row per label, one column per length, published rows below ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from megatron_coca.evaluation.contrasts import simultaneous
from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report.curves import Curve
from megatron_coca.evaluation.report.document import EMPTY, Measure, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import MARK, Metric
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.looks import Member
from megatron_coca.evaluation.report.plots.panels import MOST_BEYOND, Line, Panel, arranged, panels
from megatron_coca.evaluation.report.published import PublishedTable, comparable_tables, tables_of
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, group_results
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.statistics import (
    FEWEST_DOCUMENTS,
    RESAMPLES,
    Estimate,
    differ,
    difference_interval,
    t_quantile,
)

HASH_DIGITS = 12
"""Number of digits of a hash in a report; result files contain the whole hash."""
THEIRS = "numbers of other models on other data, for orientation only"


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report: published numbers, the label of the baseline, and learning curves by label.

    If `papers` is True, all published numbers are added; if it is False, none. By default, a published table is added
    if its training length and protocol are ours. `members` describes all labels of the report. `claim` replaces the
    sentence at the top.
    """

    papers: bool | None = None
    baseline: str | None = None
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    members: Mapping[str, Member] = field(default_factory=dict)
    claim: str = ""


ResultBuilder = Callable[[Sequence[LoadedResult], ReportOptions], list[ReportBlock]]
"""A function that makes the blocks of a section from results. A section without blocks is left out."""
BlockFunction = Callable[[ResultGroup, str, ReportOptions], ReportBlock]


def grouped(name: str, comparable: Comparable) -> Callable[[BlockFunction], ResultBuilder]:
    """Return a decorator that turns a function for one group of comparable results into a `ResultBuilder`.

    The function receives a name for its block: `name`-1 for the first group, and so on.
    """

    def decorate(block: BlockFunction) -> ResultBuilder:
        def build(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
            return [
                replace(block(group, f"{name}-{index}", options), heading=group.heading, provenance=provenance(group))
                for index, group in enumerate(group_results(loaded, comparable), 1)
            ]

        return build

    return decorate


@dataclass(frozen=True)
class LengthTable:
    """A table with one row per label and one column per length.

    Attributes:
        head: the head of the row names.
        rows: the metric of each row, by the name of the row. {} in the name is replaced by the label.
        suffix: the end of the table's name.
        published: the metric of the published tables shown with this table.
        notes: texts below the table.
        measure: describes the numbers that the sentence at the top of the report can be about, if there are any.
    """

    caption: str
    head: str
    rows: Mapping[str, Metric]
    suffix: str = ""
    published: str = ""
    notes: tuple[str, ...] = ()
    measure: Measure | None = None


def length_tables(name: str, specs: Sequence[LengthTable], group: ResultGroup, options: ReportOptions) -> list[Table]:
    """Return each table with our numbers by length, and rows of published tables with our training length and protocol.

    If all published numbers are asked for, the protocol may differ, and the remaining published tables follow.
    """
    trained, reference = group.training_lengths(), baseline_of(group, options)
    tables = []
    for spec in specs:
        theirs = tables_of(spec.published, trained) if options.papers else []
        joined = [table for table in theirs if table.training_length in trained and not table.apart]
        if options.papers is None:
            joined = comparable_tables(spec.published, trained, group.first)
        more = (at for table in theirs if table in joined for at in table.columns if isinstance(at, int))
        lengths = sorted({*group.lengths(), *more})
        rows: list[TableRow] = []
        for pattern, metric in spec.rows.items():
            ours = []
            for series in group.series:
                cells = tuple(metric.cell(series, length, reference) for length in lengths)
                ours.append(TableRow(pattern.format(series.label), cells))
            rows += mark_best(ours, metric.lowest)
        for table in joined:
            rows += published_rows(table, lengths)
        notes = (f"* training length ({', '.join(map(str, sorted(trained)))})",) if trained & set(lengths) else ()
        header, sources = (spec.head, *length_header(lengths, trained)), tuple(map(source_text, joined))
        below = (*notes, *spec.notes)
        measure = None if spec.measure is None else replace(spec.measure, trained=frozenset(trained))
        main = Table(f"{name}{spec.suffix}", spec.caption, header, tuple(rows), below, sources, measure)
        compared = any(metric.lowest for metric in spec.rows.values())
        tables.append(with_baseline_note(main, options.baseline) if compared else main)
        tables += [published_table(table, name) for table in theirs if table not in joined]
    return tables


def length_header(lengths: Iterable[int], trained: set[int]) -> tuple[str, ...]:
    return tuple(f"{length}*" if length in trained else str(length) for length in lengths)


def baseline_of(group: ResultGroup, options: ReportOptions) -> Series | None:
    """Return the series with which all others are compared, or None."""
    return next((series for series in group.series if series.label == options.baseline), None)


def with_baseline_note(table: Table, baseline: str | None) -> Table:
    """Return the table with a note that explains MARK, if any number could have the mark."""
    reference = next((row for row in table.rows if row.name == baseline and not row.published), None)
    others = [row for row in table.rows if reference is not None and row is not reference]
    pairs = [pair for row in others for pair in zip(row.cells, reference.cells, strict=True)] if reference else []
    if not any(min(len(cell.sample), len(base.sample)) >= FEWEST_DOCUMENTS for cell, base in pairs):
        return table
    note = (
        f"{MARK} differs from {baseline} on these documents: the 95% interval of the loss difference "
        f"excludes 0 ({RESAMPLES:,} paired bootstrap samples of the documents). Losses are first averaged over seeds, "
        "so the mark generalizes to other documents, not to other seeds. It is not corrected for multiple comparisons."
    )
    return replace(table, notes=(*table.notes, note))


def source_text(table: PublishedTable) -> str:
    return f"{table.name}: {table.setting}; {THEIRS}."


def published_rows(table: PublishedTable, columns: Sequence[int | str]) -> list[TableRow]:
    """Return published rows, arranged in our columns."""
    rows = []
    for row in table.rows:
        values = dict(zip(table.columns, row["values"].split(), strict=True))
        cells = tuple(TableCell(values.get(column, "")) for column in columns)
        rows.append(TableRow(row["name"], cells, f"{table.source}, {table.name}"))
    return rows


def published_table(table: PublishedTable, prefix: str) -> Table:
    """Return a published table as a separate table; its name begins with `prefix`."""
    words = "".join(character if character.isalnum() else " " for character in table.name.lower()).split()
    caption = f"Published, {table.source}: {table.name}"
    header = ("method", *map(str, table.columns))
    remark = f"; {THEIRS}" if table.measured else ""
    notes = (f"{table.setting[0].upper()}{table.setting[1:]}{remark}.",)
    return Table("-".join([prefix, *words]), caption, header, tuple(published_rows(table, table.columns)), notes)


# Plots by length


def length_figure(
    name: str,
    title: str,
    group: ResultGroup,
    metric: Metric,
    panel: Mapping[str, Any],
    caption: str,
    options: ReportOptions,
) -> list[Figure]:
    """Return a plot of a table's numbers against length, with the training lengths marked.

    `title` describes the plot to screen readers, and `panel` contains fields of `Panel`. A single length has no plot,
    because there is no line to draw.
    """
    drawn, lines = length_lines(group, metric)
    if len({x for line in lines for x in line.x}) < 2:
        return []
    lengths = sorted({series.header.checkpoint.seq_length for series in drawn})
    trained = {float(length): f"trained at {length:,}" for length in lengths}
    alt = f"{title} for {', '.join(series.label for series in drawn)}; the table contains the numbers"
    shown = arranged(lines, options.members, Panel((), marks=trained, **panel))
    caption += _bands_text(drawn, lines, bool(panel.get("log_y")))
    caption += " Grey lines: the other models." if any(each.context for each in shown) else ""
    return [Figure(name, caption, alt, *panels(shown))]


def length_lines(group: ResultGroup, metric: Metric) -> tuple[list[Series], list[Line]]:
    """Return the series with numbers, and for each of them a line with the table's numbers and intervals."""
    drawn, lines = [], []
    for series in group.series:
        cells = {length: metric.cell(series, length) for length in group.lengths()}
        known = {length: found for length, found in cells.items() if found.value is not None}
        if known:
            drawn.append(series)
            y, low, high = (
                tuple(math.nan if (value := getattr(found, end)) is None else value for found in known.values())
                for end in ("value", "low", "high")
            )
            banded = any(map(math.isfinite, low))
            lines.append(Line(series.label, tuple(known), y, low if banded else (), high if banded else ()))
    return drawn, lines


def _bands_text(drawn: Sequence[Series], lines: Sequence[Line], cut_off: bool) -> str:
    if not any(line.low for line in lines):
        return ""
    kind = "t intervals over seeds" if any(len(series.replicates) > 1 for series in drawn) else "intervals"
    beyond = f", cut off at a factor of {MOST_BEYOND:g} beyond the lines" if cut_off else ""
    return f" Bands: 95% {kind}{beyond}."


# Marks and notes

SEEDS_NOTE = (
    "With several seeds, a cell shows their mean and half of its 95% t interval (±); for perplexities and their "
    "ratios, the exponential of the mean logarithm and of the interval's ends. n: seeds, if fewer than in other cells."
)


def with_seeds_note(table: Table) -> Table:
    """Return the table with a note if numbers are means over seeds. Cells with fewer seeds than others show n."""
    most = max((cell.seeds or 0 for row in table.rows for cell in row.cells), default=0)
    if most < 2:
        return table

    def counted(cell: TableCell) -> TableCell:
        if not cell.seeds or cell.seeds == most:
            return cell
        return replace(cell, detail=", ".join(filter(None, (cell.detail, f"n = {cell.seeds}"))))

    rows = tuple(replace(row, cells=tuple(map(counted, row.cells))) for row in table.rows)
    return replace(table, rows=rows, notes=(*table.notes, SEEDS_NOTE))


def differ_significantly(one: TableCell, other: TableCell, comparisons: int = 1) -> bool:
    """Return True if two numbers differ significantly by their intervals or, without intervals, by their documents.

    The level is 5% for all `comparisons` together (Bonferroni correction).
    """
    inside = simultaneous(comparisons)
    ends = [_widened(cell, inside) for cell in (one, other)]
    if any(end is None for three in ends for end in three):
        return differ(one.sample, other.sample, inside)
    estimates = (Estimate(*three, 1) for three in ends)  # type: ignore[arg-type]
    low, high = difference_interval(*estimates)
    return low > 0 or high < 0


def testable(one: TableCell, other: TableCell) -> bool:
    """Return True if two numbers have intervals, or enough documents for a comparison."""
    ends = (end for cell in (one, other) for end in (cell.value, cell.low, cell.high))
    return all(end is not None for end in ends) or min(len(one.sample), len(other.sample)) >= FEWEST_DOCUMENTS


def _widened(cell: TableCell, inside: float) -> tuple[float | None, float | None, float | None]:
    """Return a value and the ends of its interval with the confidence `inside` instead of 95%."""
    if cell.value is None or cell.low is None or cell.high is None:
        return cell.value, cell.low, cell.high
    quantile = NormalDist().inv_cdf(0.5 + inside / 2) / NormalDist().inv_cdf(0.975)
    if cell.seeds is not None and cell.seeds > 1:
        quantile = t_quantile(cell.seeds - 1, inside) / t_quantile(cell.seeds - 1)
    low, high = (cell.value + quantile * (end - cell.value) for end in (cell.low, cell.high))
    return cell.value, low, high


def mark_best(rows: Sequence[TableRow], lowest: bool | Sequence[bool], corrected: bool = False) -> list[TableRow]:
    """Mark the best finite value of each column if it differs significantly from all others.

    `lowest`: whether the lowest value is the best, as one value for all columns or one per column. `corrected`: whether
    the level is 5% for all comparisons of a column together.
    """
    columns = []
    for index, cells in enumerate(zip(*(row.cells for row in rows), strict=True)):
        found = [(cell.value, cell) for cell in cells if cell.value is not None]
        known = [(value, cell) for value, cell in found if math.isfinite(value)]
        smallest = lowest if isinstance(lowest, bool) else lowest[index]
        _, best = (min if smallest else max)(known, key=lambda pair: pair[0], default=(0.0, EMPTY))
        others = [cell for _, cell in known if cell is not best]
        comparisons = len(others) if corrected else 1
        sure = bool(others) and all(differ_significantly(best, cell, comparisons) for cell in others)
        columns.append([replace(cell, best=sure and cell is best) for cell in cells])
    by_row = zip(*columns, strict=True) if columns else [()] * len(rows)
    return [replace(row, cells=tuple(cells)) for row, cells in zip(rows, by_row, strict=True)]


# Origin of results


def checkpoint_text(result: Result) -> str:
    checkpoint = result.checkpoint
    numbers = {"step": checkpoint.step, "seed": checkpoint.seed}
    known = "".join(f", {name} {number}" for name, number in numbers.items() if number is not None)
    return f"{checkpoint.path}{known} (weights {checkpoint.identity[:HASH_DIGITS]})"


def environment_text(result: Result) -> str:
    environment = result.environment
    return f"{environment.dtype}, {environment.backend or 'no backend'}, {environment.device}"


def overrides_text(result: Result) -> str:
    """Return the keys that evaluation changes, in parentheses; empty if nothing is changed."""
    shown = []
    for key, value in result.overrides.items():
        options = value.items() if isinstance(value, Mapping) else ()
        given = ", ".join(f"{name} {option}" for name, option in options if option is not None)
        shown.append(f"{key}: {given if isinstance(value, Mapping) else value}")
    return f" ({'; '.join(shown)})" if shown else ""


def answer_texts(protocol: Any) -> list[str]:
    """Return a protocol's notes on end tokens, chats and the dynamic length. A note that does not apply is empty."""
    return [
        f"tokens {', '.join(map(str, protocol.ends))} end an answer" if protocol.ends else "",
        f"prompts are chats ({protocol.chat})" if protocol.chat is not None else "",
        dynamic_length_text(protocol.dynamic_length),
    ]


def data_text(result: Any) -> str:
    """Return the data and the first digits of its hash; empty for a task without documents or haystack."""
    if (documents := getattr(result, "documents", None)) is not None:
        size = f"{documents.count} documents, {documents.tokens:,} tokens"
        return f"data: {', '.join(documents.sources)} (sha256 {documents.sha256[:HASH_DIGITS]}; {size})"
    if (haystack := getattr(result.protocol, "haystack", None)) is not None:
        return f"data: {haystack.name} (sha256 {haystack.sha256[:HASH_DIGITS]})"
    return ""


def provenance(group: ResultGroup) -> tuple[str, ...]:
    """Return lines with the checkpoints and their labels, the data, the devices and the software versions."""
    labels: dict[str, list[str]] = {}
    headers = [replicate.header for series in group.series for replicate in series.replicates]
    for header in headers:
        labels.setdefault(checkpoint_text(header), []).append(header.label + overrides_text(header))
    checkpoints = [f"{checkpoint}: {', '.join(measured)}" for checkpoint, measured in labels.items()]
    computed = dict.fromkeys(
        f"{environment_text(header)}, torch {header.environment.torch}, tokenizer "
        f"{(header.tokenizer or 'none')[:HASH_DIGITS]}"
        for header in headers
        if header.environment.backend
    )
    return *checkpoints, *filter(None, [data_text(group.first)]), *(f"computed with {device}" for device in computed)
