"""CoCA-Strict against CoCA-Slack: Table 3 of the CoCA paper."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.perplexity import PerplexityResult
from megatron_coca.evaluation.report import perplexity_section
from megatron_coca.evaluation.report.charts import Curve, Panel, heat_map, height, panels, short
from megatron_coca.evaluation.report.document import NOTHING, Entry, Figure, Line, ReportBlock, Table
from megatron_coca.evaluation.report.published import use_of
from megatron_coca.evaluation.report.published_tables import TABLES
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, groups, of_type
from megatron_coca.evaluation.report.tables import (
    THEIRS,
    beside,
    checkpoint_name,
    data_name,
    environment_name,
    heading,
    lacking,
    length_table,
    marked,
    number,
    origin,
    published_lines,
    published_table,
    starred,
    training_lengths,
)
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.retrieval.records import (
    NeedleResult,
    PasskeyCell,
    PasskeyResult,
    RangeTally,
    RetrievalProtocol,
    RulerResult,
    ScoredCell,
    Tally,
)

COMPARABLE: Comparable[PasskeyResult] = {
    "cases": lambda result: result.protocol.cases,
    "seed": lambda result: result.protocol.seed,
    "new tokens": lambda result: result.protocol.max_new_tokens,
    "answer stub": lambda result: result.protocol.answer_stub,
    "haystack (sha256)": lambda result: result.protocol.haystack.sha256,
    "tokenizer": lambda result: result.tokenizer,
    "dynamic length": lambda result: result.protocol.dynamic_length,
    "protocol": lambda result: result.protocol.text,
}
"""The tokenizer too: lengths are met in its tokens."""

RANGES = ("nearest quarter", "second quarter", "third quarter", "farthest quarter")
SHARES = (-0.03, 1.03)


def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """Plots and tables for each group of comparable results."""
    return [_block(group, place, papers) for place, group in enumerate(groups(loaded, COMPARABLE), 1)]


def _block(group: ResultGroup[PasskeyResult], place: int, papers: bool) -> ReportBlock:
    lengths = group.lengths()
    name, caption = f"passkey-{place}", "Passkey accuracy by length of the prompt, with 95% Wilson intervals"
    tables = length_table(name, caption, "accuracy at length", group, _entry, lengths, "passkey", papers, lowest=False)
    protocol = group.first.protocol
    text = (how(protocol, "length"),)
    if not group.cell_keys():
        return ReportBlock(heading(group), text, (), tuple(tables))
    figures = (_by_length(group, name, papers), _by_range(group, name))
    return ReportBlock(heading(group), text, figures, (tables[0], _split(group, name, lengths), *tables[1:]))


def how(protocol: RetrievalProtocol, cell: str) -> str:
    """How cells of a retrieval task were measured."""
    seen = dynamic_length_text(protocol.dynamic_length)
    return f"Protocol: {protocol.text}; {protocol.cases} cases a {cell}, seed {protocol.seed}; {seen}."


def tally(found: Tally | None) -> Entry:
    """An accuracy with its interval; a dash where there is no case."""
    if found is None:
        return Entry("–", detail="no case")
    return Entry(f"{found.accuracy:.2f}", found.accuracy, detail=f"{found.low:.2f}–{found.high:.2f}")


def _entry(series: Series[PasskeyResult], length: int) -> Entry:
    cell: PasskeyCell | None = series.cells.get((length,))
    return tally(cell) if cell is not None else lacking(series.why(f"length {length}"))


def _split(group: ResultGroup[PasskeyResult], name: str, lengths: Sequence[int]) -> Table:
    """Figure 4 of the paper as a table: keys that a context of the training length would show, and farther ones."""
    lines: list[Line] = []
    for kind in ("inside", "beyond"):
        ours = [Line(f"{each.label}, {kind}", tuple(_part(each, at, kind) for at in lengths)) for each in group.series]
        lines += marked(ours, lowest=False)
    caption = "Passkey accuracy with the key inside and beyond the training length from the end"
    header = ("accuracy at length", *starred(lengths, training_lengths(group)))
    return Table(f"{name}-split", caption, header, tuple(lines))


def _part(series: Series[PasskeyResult], length: int, kind: str) -> Entry:
    cell = series.cells.get((length,))
    return tally(getattr(cell, kind)) if cell is not None else lacking(series.why(f"length {length}"))


def accuracy_curve(label: str, x: Sequence[float], tallies: Sequence[Tally | ScoredCell]) -> Curve:
    """A line with its intervals."""
    y, low, high = (tuple(getattr(each, name) for each in tallies) for name in ("accuracy", "low", "high"))
    return Curve(label, tuple(x), y, low, high)


def _by_length(group: ResultGroup[PasskeyResult], name: str, papers: bool) -> Figure:
    curves = [
        accuracy_curve(each.label, [cell.length for cell in each.cells.values()], list(each.cells.values()))
        for each in group.measured
    ]
    for table in beside(group, "passkey")[0] if papers else []:
        for row in table.rows:
            like = [at for at, series in enumerate(group.measured) if row.is_of(series.header)]
            values = tuple(float("nan") if value == "OOM" else float(value) for value in row.values)
            lengths = tuple(float(column) for column in table.columns)
            curves += [Curve(f"paper: {row.name}", lengths, values, like=at) for at in like[:1]]
    trained = {float(length): f"training length {length}" for length in sorted(training_lengths(group))}
    panel = Panel(tuple(curves), "length of the prompt (tokens)", "accuracy", marks=trained, y_range=SHARES)
    dashed = " Dashed with hollow marks: the CoCA paper's numbers." if len(curves) > len(group.measured) else ""
    caption = f"Passkey accuracy by length with 95% Wilson intervals.{dashed} {origin(group)}"
    labels = ", ".join(series.label for series in group.measured)
    size = (6.0, height(len(curves) + len(trained)))
    return Figure(
        name, caption, f"Passkey accuracy by length for {labels}; the table has the numbers", panels([panel]), size
    )


def _by_range(group: ResultGroup[PasskeyResult], name: str) -> Figure:
    """Figure 5 of the paper: a panel for each quarter of the length that the key may be in."""
    given = []
    for at, title in enumerate(RANGES):
        curves = [_range_curve(series, at) for series in group.measured]
        given.append(Panel(tuple(curves), "length (tokens)", "accuracy", title, y_range=SHARES))
    caption = (
        "Passkey accuracy by the key's distance from the end of the prompt, in quarters of the length (Figure 5 of the "
        "CoCA paper has four ranges too), with 95% Wilson intervals. Same checkpoints, data and machine."
    )
    alt = "Passkey accuracy by length, a panel for each quarter of the distance; report.json has the numbers"
    return Figure(f"{name}-ranges", caption, alt, panels(given, columns=2), (6.0, 2.2 + height(len(group.measured))))


def _range_curve(series: Series[PasskeyResult], at: int) -> Curve:
    found: list[tuple[int, RangeTally]] = [
        (cell.length, cell.ranges[at]) for cell in series.cells.values() if at < len(cell.ranges)
    ]
    known = [(length, each.tally) for length, each in found if each.tally is not None]
    return accuracy_curve(series.label, [length for length, _ in known], [each for _, each in known])


NEEDLE_COMPARABLE: Comparable[NeedleResult] = {
    **COMPARABLE,  # type: ignore[dict-item]
    "depths": lambda result: result.protocol.depths,
}


def build_needle(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A heat map and a table for each label of each group."""
    return [_needle_block(group, place) for place, group in enumerate(groups(loaded, NEEDLE_COMPARABLE), 1)]


def _needle_block(group: ResultGroup[NeedleResult], place: int) -> ReportBlock:
    lengths = group.lengths()
    depths = group.first.protocol.depths
    figures, tables = [], []
    for at, series in enumerate(group.series, 1):
        name = f"needle-{place}-{at}"
        if series.cells:
            figures.append(_figure(series, name, lengths, depths))
        tables.append(_table(series, name, lengths, depths))
    text = (how(group.first.protocol, "cell"),)
    return ReportBlock(heading(group), text, tuple(figures), tuple(tables))


def _table(series: Series[NeedleResult], name: str, lengths: Sequence[int], depths: Sequence[int]) -> Table:
    lines = tuple(
        Line(f"{depth}%", tuple(_needle_entry(series, length, depth) for length in lengths)) for depth in depths
    )
    header = ("depth", *starred(lengths, {series.header.checkpoint.seq_length}))
    return Table(name, f"{series.label}: accuracy by depth and length", header, lines)


def _needle_entry(series: Series[NeedleResult], length: int, depth: int) -> Entry:
    cell = series.cells.get((length, depth))
    if cell is not None:
        return Entry(f"{cell.accuracy:.2f}", cell.accuracy)
    at = f"length {length}, depth {depth}%"
    return lacking(series.why(at if at in series.missing else f"length {length}"))


def _figure(series: Series[NeedleResult], name: str, lengths: Sequence[int], depths: Sequence[int]) -> Figure:
    header = series.header
    values = [
        [series.cells[length, depth].accuracy if (length, depth) in series.cells else None for length in lengths]
        for depth in depths
    ]
    rows, columns = [f"{depth}%" for depth in depths], [short(length) for length in lengths]
    caption = (
        f"{series.label}: share of needles found, by length and by how deep they are hidden (0% is the beginning). "
        f"Trained at {header.checkpoint.seq_length}. Checkpoint: {checkpoint_name(header)}. {data_name(header)}"
        f"Computed with {environment_name(header)}."
    )
    draw = heat_map(rows, columns, values, "length of the prompt (tokens)", "depth of the needle")
    alt = f"Heat map of needles found by {series.label} over depth and length; the table has the numbers"
    return Figure(name, caption, alt, draw, (6.0, 1.4 + 0.3 * max(6, len(depths))))


RULER_COMPARABLE: Comparable[RulerResult] = {**COMPARABLE}  # type: ignore[dict-item]


def build_ruler(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A plot of the means and a table of all tasks for each group."""
    return [_ruler_block(group, place) for place, group in enumerate(groups(loaded, RULER_COMPARABLE), 1)]


def _ruler_block(group: ResultGroup[RulerResult], place: int) -> ReportBlock:
    tasks = list(dict.fromkeys(task for task, _ in group.cell_keys()))
    lengths = group.lengths()
    name = f"ruler-{place}"
    lines: list[Line] = []
    for task in tasks:
        of_task = [Line(f"{task}: {each.label}", _entries(each, task, lengths)) for each in group.series]
        lines += marked(of_task, lowest=False)
    lines += marked([Line(f"mean: {each.label}", _means(each, tasks, lengths)) for each in group.series], lowest=False)
    header = ("share found at length", *starred(lengths, training_lengths(group)))
    notes = ("Intervals are 95% Wilson intervals. A mean is of all tasks of the table, and absent where one is.",)
    table = Table(name, "Share of the expected strings in the answers", header, tuple(lines), notes)
    text = (how(group.first.protocol, "cell"),)
    figures = (_ruler_figure(group, name, tasks, lengths),) if group.cell_keys() else ()
    return ReportBlock(heading(group), text, figures, (table,))


def _entries(series: Series[RulerResult], task: str, lengths: Sequence[int]) -> tuple[Entry, ...]:
    return tuple(_ruler_entry(series, task, length) for length in lengths)


def _ruler_entry(series: Series[RulerResult], task: str, length: int) -> Entry:
    cell = series.cells.get((task, length))
    return tally(cell) if cell is not None else lacking(series.why(f"{task}, length {length}"))


def _mean(series: Series[RulerResult], tasks: Sequence[str], length: int) -> float | None:
    cells = [series.cells.get((task, length)) for task in tasks]
    known = [cell.accuracy for cell in cells if cell is not None]
    return fmean(known) if known and len(known) == len(tasks) else None


def _means(series: Series[RulerResult], tasks: Sequence[str], lengths: Sequence[int]) -> tuple[Entry, ...]:
    means = [_mean(series, tasks, length) for length in lengths]
    return tuple(Entry("–") if mean is None else Entry(f"{mean:.2f}", mean) for mean in means)


def _ruler_figure(group: ResultGroup[RulerResult], name: str, tasks: Sequence[str], lengths: Sequence[int]) -> Figure:
    curves = []
    for series in group.measured:
        means = {length: _mean(series, tasks, length) for length in lengths}
        known = {length: mean for length, mean in means.items() if mean is not None}
        curves.append(Curve(series.label, tuple(known), tuple(known.values())))
    trained = {float(length): f"training length {length}" for length in sorted(training_lengths(group))}
    panel = Panel(tuple(curves), "length of the prompt (tokens)", "mean share found", marks=trained, y_range=SHARES)
    caption = f"Mean over {len(tasks)} tasks ({', '.join(tasks)}) by length. {origin(group)}"
    labels = ", ".join(series.label for series in group.measured)
    size = (6.0, height(len(curves) + len(trained)))
    return Figure(
        name, caption, f"Mean share found by length for {labels}; the table has the numbers", panels([panel]), size
    )


Read = Callable[[Series[Any], Any], Entry]
Measures = tuple[str, str, type[Result], Comparable[Any], Read]

MEASURES: tuple[Measures, ...] = (
    ("strict perplexity", "Perplexity", PerplexityResult, perplexity_section.COMPARABLE, perplexity_section.cell_entry),
    (
        "strict passkey",
        "Passkey accuracy",
        PasskeyResult,
        COMPARABLE,
        lambda _, cell: Entry(number(cell.accuracy), cell.accuracy),
    ),
)
"""Metric of the paper's table, its name, the results, what must agree, and the entry of a series' cell."""


def build_strict(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A table for each group that has both forms, used in the same way."""
    blocks = []
    for metric, title, kind, comparable, read in MEASURES:
        for place, group in enumerate(groups(of_type(loaded, kind), comparable), 1):
            if pairs := _pairs(group):
                name = f"{metric.replace(' ', '-')}-{place}"
                tables = _tables(group, pairs, name, title, read, metric if papers else "")
                blocks.append(ReportBlock(heading(group), (origin(group),), (), tables))
    return blocks


def _pairs(group: ResultGroup[Any]) -> list[tuple[Series[Any], Series[Any]]]:
    """Slack and Strict of the same use and training length."""
    return [
        (slack, strict)
        for slack in group.series
        for strict in group.series
        if (use := use_of(slack.header)) is not None
        and use.pos_emb == "coca"
        and replace(use, pos_emb="coca_strict") == use_of(strict.header)
        and slack.header.checkpoint.seq_length == strict.header.checkpoint.seq_length
    ]


def _tables(
    group: ResultGroup[Any],
    pairs: Sequence[tuple[Series[Any], Series[Any]]],
    name: str,
    title: str,
    read: Read,
    metric: str,
) -> tuple[Table, ...]:
    """Ours, with the paper's rows below where the training length is the same; else its table on its own."""
    trained = training_lengths(group)
    theirs = [table for table in TABLES if table.metric == metric]
    joined = [table for table in theirs if table.training_length in trained]
    columns = sorted({key[0] for pair in pairs for each in pair for key in each.cells})
    columns = sorted({*columns, *(at for table in joined for at in table.columns if isinstance(at, int))})
    lines = [line for pair in pairs for line in _lines(*pair, columns, read)]
    lines += [line for table in joined for line in published_lines(table, columns, None)]
    sources = tuple(f"{table.name}: {table.setting}; {THEIRS}." for table in joined)
    caption = f"{title}: CoCA-Slack, and what CoCA-Strict adds to it"
    main = Table(name, caption, ("at length", *starred(columns, trained)), tuple(lines), sources=sources)
    return main, *(published_table(table, None, name) for table in theirs if table not in joined)


def _lines(slack: Series[Any], strict: Series[Any], columns: Sequence[int], read: Read) -> tuple[Line, Line]:
    first, second = (
        [read(series, series.cells[column,]) if (column,) in series.cells else NOTHING for column in columns]
        for series in (slack, strict)
    )
    differences = tuple(map(_difference, first, second))
    return Line(slack.label, tuple(first)), Line(f"{strict.label}: difference", differences)


def _difference(slack: Entry, strict: Entry) -> Entry:
    if slack.value is None or strict.value is None:
        return NOTHING
    if slack.partial or strict.partial:
        return Entry("–", note=slack.note or strict.note)
    return Entry(number(strict.value - slack.value, sign=True), strict.value - slack.value)
