"""The sections on retrieval: passkeys, needles in a haystack and RULER-style tasks."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import (
    Figure,
    HeatMap,
    Panel,
    heat_maps,
    panels,
    short_length,
    size_with_legend,
)
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.reading import Comparable, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.retrieval.retrieval_tasks import RetrievalProtocol, Tally, wilson_interval

RETRIEVAL_COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "new tokens": "protocol.max_new_tokens",
    "answer stub": "protocol.answer_stub",
    "haystack (sha256)": "protocol.haystack.sha256",
    "tokenizer": "tokenizer",  # lengths are counted in its tokens
    "dynamic length": "protocol.dynamic_length",
    "protocol": "protocol.text",
}
NEEDLE_COMPARABLE: Comparable = {**RETRIEVAL_COMPARABLE, "depths": "protocol.depths"}

SHARES = (-0.03, 1.03)
"""The range of accuracies on an axis."""
ACCURACY = "accuracy (share of cases)"
TallyOf = Callable[[Any], Tally | None]
"""A tally of a cell."""
QUARTERS = ("nearest", "second", "third", "farthest")
"""Of the length of a prompt, by distance from its end."""
INTERVALS = "Wilson's for one seed, t intervals over seeds for several, Wilson's of all cases where seeds agree"


def retrieval_text(protocol: RetrievalProtocol, cell: str) -> str:
    seen = dynamic_length_text(protocol.dynamic_length)
    return f"Protocol: {protocol.text}; {protocol.cases} cases a {cell}, seed {protocol.seed}; {seen}."


def tally_cell(series: Series, key: tuple[Any, ...], at: str, tally: TallyOf = lambda cell: cell) -> TableCell:
    """An accuracy: of one seed with its Wilson interval, of several with their t interval."""

    cells = [replicate.cells[key] for replicate in series.replicates if key in replicate.cells]
    tallies = [own for own in map(tally, cells) if own is not None]
    if cells and not tallies:
        return TableCell("–", detail="no case")

    def accuracy(cell: Any) -> float | None:
        own = tally(cell)
        return own.accuracy if own is not None else None

    cell = shared.value_cell(series, at, lambda replicate: replicate.number(key, accuracy))
    if cell.value is None or cell.low is not None:
        return cell
    # Of one seed, and of seeds that agree exactly, which have no t interval.
    low, high = wilson_interval(cell.value, sum(own.count for own in tallies))
    return replace(cell, detail=f"{low:.2f}–{high:.2f}", low=low, high=high)


def passkey_cell(series: Series, length: int, tally: TallyOf = lambda cell: cell) -> TableCell:
    return tally_cell(series, (length,), f"length {length}", tally)


@shared.grouped("passkey", RETRIEVAL_COMPARABLE)
def passkey_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """CoCA Table 2, Figure 4 as a table (keys inside and beyond the training length), and Figure 5 (four ranges)."""
    metric = "passkey" if options.papers else ""
    caption = f"Passkey accuracy by length of the prompt, with 95% intervals ({INTERVALS})"
    tables = shared.length_table(name, caption, "accuracy at length", group, passkey_cell, metric, lowest=False)
    text = [retrieval_text(group.first.protocol, "length")]
    if not group.measured:
        return ReportBlock(tuple(text), (), tuple(tables))
    lengths = group.lengths()
    rows: list[TableRow] = []
    for side in ("inside", "beyond"):
        counts = attrgetter(side)
        ours = [
            TableRow(f"{series.label}, {side}", tuple(passkey_cell(series, at, counts) for at in lengths))
            for series in group.series
        ]
        rows += shared.mark_best(ours, lowest=False)
    caption = "Passkey accuracy with the key inside and beyond the training length from the end"
    header = ("accuracy at length", *shared.length_header(lengths, group.training_lengths()))
    split = Table(f"{name}-split", caption, header, tuple(rows))
    caption = "Passkey accuracy of variants less that of the plain model"
    accuracy = lambda replicate, length: accuracy_at((length,), replicate)  # noqa: E731
    paired = shared.paired_tables(name, caption, group, accuracy, "{:+.2f}".format)
    tables[1:1] = [*paired, split]
    drawn, lines = shared.length_lines(group, passkey_cell)
    if not any(y > 0 for line in lines for y in line.y):
        text.insert(0, "All zero: no label finds a key at any length, so there is no plot.")
        return ReportBlock(tuple(text), (), tuple(tables))
    theirs = shared.published_lines(group, drawn, metric)
    caption = f"Passkey accuracy by length with 95% intervals: {INTERVALS}.{shared.DASHED if theirs else ''}"
    panel = {"x_label": "length of the prompt (tokens)", "y_label": ACCURACY, "y_range": SHARES}
    figures = [shared.length_figure(name, "Passkey accuracy by length", drawn, [*lines, *theirs], panel, caption)]
    if len(lengths) > 1:
        figures += [passkey_ranges_figure(group, name)] if len(drawn) <= shared.MOST_LINES else []
        figures.append(passkey_labels_figure(group, name))
    figures.append(passkey_depths_figure(group, name))
    return ReportBlock(tuple(text), tuple(figures), tuple(tables))


def quarter_of(index: int) -> TallyOf:
    """The tally of a quarter of the distances, the nearest first."""
    return lambda cell: cell.ranges[index].tally if index < len(cell.ranges) else None


def passkey_ranges_figure(group: ResultGroup, name: str) -> Figure:
    panel = {"x_label": "length (tokens)", "y_label": ACCURACY, "y_range": SHARES}
    quarters = []
    for index, title in enumerate(QUARTERS):
        _, lines = shared.length_lines(group, partial(passkey_cell, tally=quarter_of(index)))
        quarters.append(Panel(tuple(lines), title=f"{title} quarter", **panel))  # type: ignore[arg-type]
    caption = (
        "Passkey accuracy by the key's distance from the end of the prompt, in quarters of the length (Figure 5 of the "
        f"CoCA paper has four ranges too), with 95% intervals: {INTERVALS}."
    )
    alt = "Passkey accuracy by length, a panel for each quarter of the distance; report.json has the numbers"
    size = size_with_legend([series.label for series in group.measured], 5.4)
    return Figure(f"{name}-ranges", caption, alt, panels(quarters, columns=2), size)


def passkey_labels_figure(group: ResultGroup, name: str) -> Figure:
    """A heat map of accuracy by label and length."""
    lengths, labels = group.lengths(), [series.label for series in group.measured]
    values = [[passkey_cell(series, length).value for length in lengths] for series in group.measured]
    heads = [short_length(length) for length in lengths]
    return Figure(
        f"{name}-labels",
        "Passkey accuracy by length; means over seeds where there are several.",
        f"Heat map of passkey accuracy over length for {', '.join(labels)}; the table has the numbers",
        heat_maps([("", values)], labels, heads, "length of the prompt (tokens)", ""),
        (6.0 + 0.07 * max(map(len, labels)), 1.2 + 0.3 * max(3, len(labels))),
    )


def passkey_depths_figure(group: ResultGroup, name: str) -> Figure:
    """Heat maps of accuracy by length and distance of the key for each label; one by label if there is one length."""
    lengths, labels = group.lengths(), [series.label for series in group.measured]
    caption = (
        "Passkey accuracy by the quarter of the length in which the key is, counted from the end: the farthest quarter "
        "is the beginning of the prompt. Means over seeds where there are several."
    )
    alt = f"Heat maps of passkey accuracy over length and distance for {', '.join(labels)}; report.json has the numbers"
    quarters = [
        [[passkey_cell(series, at, quarter_of(index)).value for at in lengths] for index in range(len(QUARTERS))]
        for series in group.measured
    ]
    if len(lengths) == 1:
        values = [[value for (value,) in by_quarter] for by_quarter in quarters]
        draw = heat_maps([("", values)], labels, QUARTERS, f"quarter of {lengths[0]} tokens", "")
        size = (6.0 + 0.07 * max(map(len, labels)), 1.2 + 0.3 * max(3, len(labels)))
        return Figure(f"{name}-depths", caption, alt, draw, size)
    maps: list[HeatMap] = [(label, values[::-1]) for label, values in zip(labels, quarters, strict=True)]
    columns = min(3, len(maps))
    heads = [short_length(length) for length in lengths]
    draw = heat_maps(maps, QUARTERS[::-1], heads, "length (tokens)", "quarter", columns)
    return Figure(
        f"{name}-depths", caption, alt, draw, (9.0 if columns == 3 else 6.5, 1.2 + 1.5 * math.ceil(len(maps) / columns))
    )


@shared.grouped("needle", NEEDLE_COMPARABLE)
def needle_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """A heat map and a table of accuracy by depth and length for each label."""
    lengths, depths = group.lengths(), group.first.protocol.depths
    percents = [f"{depth}%" for depth in depths]
    figures, tables = [], []
    for index, series in enumerate(group.series, 1):
        trained = series.header.checkpoint.seq_length
        rows = [
            TableRow(percent, tuple(needle_cell(series, length, depth) for length in lengths))
            for percent, depth in zip(percents, depths, strict=True)
        ]
        header = ("depth", *shared.length_header(lengths, {trained}))
        caption = f"{series.label}: accuracy by depth and length"
        tables.append(Table(f"{name}-{index}", caption, header, tuple(rows)))
        if not series.keys:
            continue
        caption = (
            f"{series.label}: share of needles found, by length and by how deep they are hidden (0% is the beginning). "
            f"Trained at {trained}."
        )
        values = [[cell.value for cell in row.cells] for row in rows]
        columns = [short_length(length) for length in lengths]
        draw = heat_maps([("", values)], percents, columns, "length of the prompt (tokens)", "depth of the needle")
        alt = f"Heat map of needles found by {series.label} over depth and length; the table has the numbers"
        figures.append(Figure(f"{name}-{index}", caption, alt, draw, (6.0, 1.4 + 0.3 * max(6, len(depths)))))
    text = (retrieval_text(group.first.protocol, "cell"),)
    return ReportBlock(text, tuple(figures), tuple(tables))


def needle_cell(series: Series, length: int, depth: int) -> TableCell:
    at = f"length {length}, depth {depth}%"
    at = at if at in series.missing() else f"length {length}"
    return shared.value_cell(series, at, partial(accuracy_at, (length, depth)))


def accuracy_at(key: tuple[Any, ...], replicate: Replicate) -> float | None:
    return replicate.number(key, attrgetter("accuracy"))


@shared.grouped("ruler", RETRIEVAL_COMPARABLE)
def ruler_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """A table of all tasks and their mean by length, and a plot of the means."""
    tasks, lengths = list(dict.fromkeys(task for task, _ in group.cell_keys())), group.lengths()

    def mean_cell(series: Series, length: int) -> TableCell:
        def mean(replicate: Replicate) -> float | None:
            values = [accuracy_at((task, length), replicate) for task in tasks]
            known = [value for value in values if value is not None]
            return fmean(known) if known and len(known) == len(tasks) else None

        cell = shared.value_cell(series, "", mean)
        return TableCell("–") if cell.absent else cell

    rows: list[TableRow] = []
    for task in tasks:
        ours = [
            (
                series.label,
                tuple(tally_cell(series, (task, length), f"{task}, length {length}") for length in lengths),
            )
            for series in group.series
        ]
        rows += shared.mark_best([TableRow(f"{task}: {label}", cells) for label, cells in ours], lowest=False)
    means = {series.label: tuple(mean_cell(series, length) for length in lengths) for series in group.series}
    rows += shared.mark_best([TableRow(f"mean: {label}", cells) for label, cells in means.items()], lowest=False)
    header = ("share found at length", *shared.length_header(lengths, group.training_lengths()))
    note = f"Intervals: {INTERVALS}. A mean is of all tasks of the table, and absent where one is."
    table = Table(name, "Share of the expected strings in the answers", header, tuple(rows), (note,))
    figures = []
    drawn, lines = shared.length_lines(group, mean_cell)
    if drawn:
        caption = f"Mean over {len(tasks)} tasks ({', '.join(tasks)}) by length.{shared.bands_text(drawn)}"
        panel = {
            "x_label": "length of the prompt (tokens)",
            "y_label": "mean share of strings found",
            "y_range": SHARES,
        }
        figures.append(shared.length_figure(name, "Mean share found by length", drawn, lines, panel, caption))
    text = (retrieval_text(group.first.protocol, "cell"),)
    return ReportBlock(text, tuple(figures), (table,))
