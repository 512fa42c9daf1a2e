"""Windowed relative positions and extensions of one model: the tables of Su's pages on ReRoPE."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_coca.evaluation.perplexity import PerplexityResult, WindowResult
from megatron_coca.evaluation.report.charts import Curve, Panel, height, panels
from megatron_coca.evaluation.report.document import Entry, Figure, ReportBlock, Table
from megatron_coca.evaluation.report.published import use_of
from megatron_coca.evaluation.report.published_tables import TABLES
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, groups
from megatron_coca.evaluation.report.tables import (
    beside,
    heading,
    lacking,
    length_table,
    number,
    origin,
    published_table,
    training_lengths,
)

COMPARABLE: Comparable[PerplexityResult] = {
    "documents (sha256)": lambda result: result.documents.sha256,
    "stride": lambda result: result.protocol.stride,
    "protocol": lambda result: result.protocol.text,
}
FIGURE = "report"
"""The name of the first plot's file."""


def build(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A plot and a table for each group of comparable results."""
    return [_block(group, place, papers) for place, group in enumerate(groups(loaded, COMPARABLE), 1)]


def _block(group: ResultGroup[PerplexityResult], place: int, papers: bool) -> ReportBlock:
    windows = group.lengths()
    name = f"perplexity-{place}"
    tables = length_table(
        name, "Perplexity by window", "perplexity at window", group, _entry, windows, "perplexity", papers
    )
    drawn = [series for series in group.series if complete(series)]
    figures = (figure(group, drawn, FIGURE if place == 1 else f"{FIGURE}_{place}", papers),) if drawn else ()
    text = (f"Protocol: {group.first.protocol.text}; stride {group.first.protocol.stride}.",)
    return ReportBlock(heading(group), text, figures, (_scored(tables[0], group), *tables[1:]))


def _scored(table: Table, group: ResultGroup[PerplexityResult]) -> Table:
    """The table with what one of its cells rests on among its notes."""
    documents = group.first.documents
    counts = {cell.tokens_scored for series in group.series for cell in complete(series)}
    scored = f", {max(counts)} tokens scored" if counts else ""
    note = f"stride {group.first.protocol.stride}, {documents.count} documents{scored}"
    return replace(table, notes=(*table.notes, note))


def _entry(series: Series[PerplexityResult], window: int) -> Entry:
    cell: WindowResult | None = series.cells.get((window,))
    if cell is None:
        return lacking(series.why(f"window {window}"))
    return cell_entry(series, cell)


def cell_entry(series: Series[PerplexityResult], cell: WindowResult) -> Entry:
    """The perplexity of `cell`."""
    return marked_partial(Entry(number(cell.perplexity), cell.perplexity), series, cell)


def marked_partial(entry: Entry, series: Series[PerplexityResult], cell: WindowResult) -> Entry:
    """An entry out of `cell`: where only some documents are scored it says so, and is not held against others."""
    note = interrupted(series, cell)
    return replace(entry, note=note, partial=bool(note))


def interrupted(series: Series[PerplexityResult], cell: WindowResult) -> str:
    """What is missing of a window; empty where all documents are scored."""
    count = series.header.documents.count
    return f"interrupted: the first {cell.documents} of {count} documents" if cell.documents < count else ""


def complete(series: Series[PerplexityResult]) -> list[WindowResult]:
    """The windows of which all documents are scored."""
    return [cell for cell in series.cells.values() if not interrupted(series, cell)]


def figure(
    group: ResultGroup[PerplexityResult], drawn: Sequence[Series[PerplexityResult]], name: str, papers: bool
) -> Figure:
    """Perplexity against window, both logarithmic, with the papers' lines of the same method and training length.

    `drawn` are the series of the group that have a complete window.
    """
    curves = [_curve(series) for series in drawn]
    curves += _published(group, drawn) if papers else []
    trained = {float(length): f"training length {length}" for length in sorted(training_lengths(group))}
    panel = Panel(tuple(curves), "window (tokens)", "perplexity", log_y=True, marks=trained)
    dashed = " Dashed with hollow marks: the CoCA paper's numbers." if len(curves) > len(drawn) else ""
    caption = (
        f"Perplexity against the window, sliding by {group.first.protocol.stride} tokens; an infinite one leaves a gap."
        f"{_left_out(group)}{dashed} {origin(group)}"
    )
    labels = ", ".join(series.label for series in drawn)
    size = (6.0, height(len(curves) + len(trained)))
    return Figure(name, caption, f"Perplexity by window for {labels}; the table has the numbers", panels([panel]), size)


def _curve(series: Series[PerplexityResult]) -> Curve:
    cells = complete(series)
    return Curve(series.label, tuple(cell.window for cell in cells), tuple(cell.perplexity for cell in cells))


def _left_out(group: ResultGroup[PerplexityResult]) -> str:
    whole = all(len(complete(series)) == len(series.cells) for series in group.series)
    return "" if whole else " Interrupted windows are left out."


def _published(group: ResultGroup[PerplexityResult], drawn: Sequence[Series[PerplexityResult]]) -> list[Curve]:
    """A line for each of ours that has the method and the training length of a row of the paper."""
    curves = []
    for table in beside(group, "perplexity")[0]:
        for row in table.rows:
            like = [at for at, series in enumerate(drawn) if row.is_of(series.header)]
            values = [float(value) if value != "OOM" else math.nan for value in row.values]
            lengths = tuple(float(column) for column in table.columns)
            curves += [Curve(f"paper: {row.name}", lengths, tuple(values), like=at) for at in like[:1]]
    return curves


ACCURACY = (
    "Su counts the tokens that are predicted right, on texts of the training length, on longer ones, and on longer ones "
    "that repeat their beginning (`--repeat`, a table of its own here)."
)


def build_rerope(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """A table of losses for each group in which a model is used with a relative-position map."""
    chosen = [group for group in groups(loaded, COMPARABLE) if any(map(_mapped, group.series))]
    return [_rerope_block(group, place, papers) for place, group in enumerate(chosen, 1)]


def _mapped(series: Series[PerplexityResult]) -> bool:
    use = use_of(series.header)
    return use is not None and use.positions != "none"


def _rerope_block(group: ResultGroup[PerplexityResult], place: int, papers: bool) -> ReportBlock:
    windows, name = group.lengths(), f"rerope-{place}"
    tables = length_table(
        name, "Loss in nats per token by window", "loss at window", group, _loss, windows, "loss", papers
    )
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += length_table(f"{name}-accuracy", caption, head, group, _accuracy, windows, "", False, lowest=False)
    published = [table for table in TABLES if table.metric == "next-token accuracy"] if papers else []
    tables += [published_table(table, group, name) for table in published]
    return ReportBlock(heading(group), (*([ACCURACY] if published else []), origin(group)), (), tuple(tables))


def _loss(series: Series[PerplexityResult], window: int) -> Entry:
    cell = series.cells.get((window,))
    if cell is None:
        return lacking(series.why(f"window {window}"))
    return marked_partial(Entry(number(cell.nll, 4), cell.nll), series, cell)


def _accuracy(series: Series[PerplexityResult], window: int) -> Entry:
    cell = series.cells.get((window,))
    if cell is None:
        return lacking(series.why(f"window {window}"))
    return marked_partial(Entry(number(100 * cell.accuracy), cell.accuracy), series, cell)
