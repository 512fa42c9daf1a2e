"""The sections on retrieval: passkeys, needles in a haystack, RULER-style tasks, and key-value recall."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import (
    SHARES,
    Figure,
    Line,
    Panel,
    heat_maps,
    panels,
    short_length,
    size_with_legend,
)
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import Metric, value_cell
from megatron_coca.evaluation.report.reading import Comparable, Replicate, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.retrieval.recall import RecallCell, retrieving_head, scores_of
from megatron_coca.evaluation.retrieval.retrieval_tasks import PasskeyCell, RetrievalProtocol, Tally

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

ACCURACY = "accuracy (share of cases)"
QUARTERS = ("nearest", "second", "third", "farthest")
"""Of the length of a prompt, by distance from its end."""
INTERVALS = "Wilson's for one seed, t intervals over seeds for several, Wilson's of all cases where seeds agree"


def retrieval_text(protocol: RetrievalProtocol, cell: str) -> str:
    seen = dynamic_length_text(protocol.dynamic_length)
    return f"Protocol: {protocol.text}; {protocol.cases} cases a {cell}, seed {protocol.seed}; {seen}."


def whole(cell: Any) -> Tally:
    return cell


PASSKEY = Metric("length {}", tally=whole)
RULER = Metric("{}, length {}", tally=whole)
SIDES = {side: replace(PASSKEY, tally=attrgetter(side)) for side in ("inside", "beyond")}
"""With the fact inside and beyond the training length from the end of the prompt."""


@shared.grouped("passkey", RETRIEVAL_COMPARABLE)
def passkey_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """CoCA Table 2, Figure 4 as a table (keys inside and beyond the training length), and Figure 5 (four ranges)."""
    metric = "passkey" if options.papers else ""
    caption = f"Passkey accuracy by length of the prompt, with 95% intervals ({INTERVALS})"
    tables = shared.length_table(name, caption, "accuracy at length", group, PASSKEY, metric)
    text = [retrieval_text(group.first.protocol, "length")]
    if not group.measured:
        return ReportBlock(tuple(text), (), tuple(tables))
    lengths = group.lengths()
    rows: list[TableRow] = []
    for side, split in SIDES.items():
        ours = [
            TableRow(f"{series.label}, {side}", tuple(split.cell(series, at) for at in lengths))
            for series in group.series
        ]
        rows += shared.mark_best(ours, lowest=False)
    caption = "Passkey accuracy with the key inside and beyond the training length from the end"
    header = ("accuracy at length", *shared.length_header(lengths, group.training_lengths()))
    by_side = Table(f"{name}-split", caption, header, tuple(rows))
    caption = "Passkey accuracy of variants less that of the plain model"
    paired = shared.paired_tables(name, caption, group, PASSKEY, "{:+.2f}".format)
    tables[1:1] = [*paired, by_side]
    drawn, lines = shared.length_lines(group, PASSKEY.cell)
    if not any(y > 0 for line in lines for y in line.y):
        text.insert(0, "All zero: no label finds a key at any length, so there is no plot.")
        return ReportBlock(tuple(text), (), tuple(tables))
    theirs = shared.published_lines(group, drawn, metric)
    caption = f"Passkey accuracy by length with 95% intervals: {INTERVALS}.{shared.DASHED if theirs else ''}"
    panel = {"x_label": "length of the prompt (tokens)", "y_label": ACCURACY, "y_range": SHARES}
    figures = shared.length_figure(name, "Passkey accuracy by length", drawn, [*lines, *theirs], panel, caption)
    return ReportBlock(tuple(text), (*figures, passkey_depths_figure(group, name)), tuple(tables))


def passkey_depths_figure(group: ResultGroup, name: str) -> Figure:
    """Heat maps of accuracy by length and distance of the key for each label."""
    lengths, labels = group.lengths(), [series.label for series in group.measured]
    caption = (
        "Passkey accuracy by the quarter of the length in which the key is, counted from the end: the farthest quarter "
        "is the beginning of the prompt (Figure 5 of the CoCA paper has four ranges too). Means over seeds where there "
        "are several."
    )
    alt = f"Heat maps of passkey accuracy over length and distance for {', '.join(labels)}; report.json has the numbers"
    quarters = [replace(PASSKEY, tally=partial(quarter, number)) for number in reversed(range(len(QUARTERS)))]
    maps = [
        (series.label, [[metric.cell(series, length).value for length in lengths] for metric in quarters])
        for series in group.measured
    ]
    columns = min(3, len(maps))
    heads = [short_length(length) for length in lengths]
    draw = heat_maps(maps, QUARTERS[::-1], heads, "length (tokens)", "quarter", columns)
    size = (9.0 if columns == 3 else 6.5, 1.2 + 1.5 * math.ceil(len(maps) / columns))
    return Figure(f"{name}-depths", caption, alt, draw, size)


def quarter(number: int, cell: PasskeyCell) -> Tally | None:
    """The tally of a quarter of the distances, the nearest first."""
    return cell.ranges[number].tally if number < len(cell.ranges) else None


@shared.grouped("needle", NEEDLE_COMPARABLE)
def needle_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """A heat map and a table of accuracy by depth and length for each label."""
    lengths, depths = group.lengths(), group.first.protocol.depths
    percents = [f"{depth}%" for depth in depths]
    figures, tables = [], []
    for index, series in enumerate(group.series, 1):
        trained = series.header.checkpoint.seq_length
        rows = [
            TableRow(percent, tuple(PASSKEY.cell(series, length, depth) for length in lengths))
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


@shared.grouped("ruler", RETRIEVAL_COMPARABLE)
def ruler_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """A table of all tasks and their mean by length, and a plot of the means."""
    tasks, lengths = list(dict.fromkeys(task for task, _ in group.cell_keys())), group.lengths()

    def mean_cell(series: Series, length: int) -> TableCell:
        def mean(replicate: Replicate) -> float | None:
            values = [RULER.of(replicate, task, length) for task in tasks]
            known = [value for value in values if value is not None]
            return fmean(known) if known and len(known) == len(tasks) else None

        cell = value_cell(series, "", mean)
        return TableCell("–") if cell.absent else cell

    rows: list[TableRow] = []
    for task in tasks:
        ours = [
            (series.label, tuple(RULER.cell(series, task, length) for length in lengths)) for series in group.series
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
        figures = shared.length_figure(name, "Mean share found by length", drawn, lines, panel, caption)
    text = (retrieval_text(group.first.protocol, "cell"),)
    return ReportBlock(text, tuple(figures), (table,))


# Recall

RECALL_COMPARABLE: Comparable = {
    "cases": "protocol.cases",
    "seed": "protocol.seed",
    "prompts": "protocol.prompts",
    "protocol": "protocol.text",
}
SHIFTED = Metric("length {}, shift {}", tally=whole)


@shared.grouped("recall", RECALL_COMPARABLE)
def recall_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Accuracy by length, split by the distance of the fact; by shift of all positions; scores of retrieving heads."""
    protocol = group.first.protocol
    keys = group.cell_keys()
    lengths = sorted({length for length, shift in keys if shift == 0})
    chance = "" if protocol.chance is None else f" A random value is right in {protocol.chance:.3f} of the cases."
    text = f"Protocol: {protocol.text}; {protocol.prompts}; {protocol.cases} cases, seed {protocol.seed}.{chance}"
    if not keys:
        return ReportBlock((text,), (), ())
    header = ("accuracy at length", *shared.length_header(lengths, group.training_lengths()))

    def row(series: Series, label: str, metric: Metric) -> TableRow:
        return TableRow(label, tuple(metric.cell(series, length, 0) for length in lengths))

    rows = [row(series, series.label, PASSKEY) for series in group.series]
    tables = [Table(name, f"Recall by length, with 95% intervals ({INTERVALS})", header, tuple(rows))]
    rows = [row(series, f"{series.label}, {side}", metric) for side, metric in SIDES.items() for series in group.series]
    caption = "Recall of facts within the training length of the question (inside) and before it (beyond)"
    tables.append(Table(f"{name}-split", caption, header, tuple(rows)))
    panel = {"x_label": "length (tokens)", "y_label": "accuracy", "y_range": SHARES, "level": protocol.chance}
    drawn, lines = shared.length_lines(group, lambda series, length: PASSKEY.cell(series, length, 0))
    caption = f"Recall by length with 95% intervals: {INTERVALS}. The horizontal line is chance."
    figures = shared.length_figure(name, "Recall by length", drawn, lines, panel, caption)
    trained = min(group.training_lengths())
    shifts = sorted({shift for length, shift in keys if length == trained})
    if len(shifts) > 1:
        shifted = tuple(
            TableRow(series.label, tuple(SHIFTED.cell(series, trained, shift) for shift in shifts))
            for series in group.series
        )
        caption = f"Recall at length {trained} with all positions shifted"
        tables.append(Table(f"{name}-shift", caption, ("shift", *map(str, shifts)), shifted))
    figures += heads_figures(group.measured, lengths, name)
    return ReportBlock((text,), tuple(figures), tuple(tables))


def head_panels(recalls: Mapping[str, Sequence[Mapping[float, RecallCell]]], x_label: str) -> list[Panel]:
    """Score of the fact and log-sum-exp of the rest in the retrieving head, a panel each: means over seeds by length.

    `recalls` has the unshifted cells of each seed by label, by ascending length.
    """
    drawn = []
    for title, score in (("score of the fact", "fact"), ("log-sum-exp of all other keys", "rest")):
        lines = []
        for label, seeds in recalls.items():
            found: dict[float, list[float]] = {}
            for cells in seeds:
                place = retrieving_head(list(cells.values()))
                for length, cell in cells.items():
                    head = None if place is None else scores_of(cell, place)
                    if head is not None and getattr(head, score) is not None:
                        found.setdefault(length, []).append(getattr(head, score))
            if found:
                lines.append(Line(label, tuple(found), tuple(map(fmean, found.values()))))
        drawn.append(Panel(tuple(lines), x_label, "score", title=title))
    return drawn


def heads_figures(measured: Sequence[Series], lengths: Sequence[int], name: str) -> list[Figure]:
    recalls = {
        series.label: [
            {float(length): cell for (length, shift), cell in replicate.cells.items() if not shift}
            for replicate in series.replicates
        ]
        for series in measured
    }
    drawn = head_panels(recalls, "length (tokens)")
    if not drawn[0].lines or len(lengths) < 2:
        return []
    caption = (
        "Scores of the question in the retrieving head (largest weight on the fact at the shortest length), as softmax "
        "takes them: where it equals the log-sum-exp of all other keys, the fact has half of the weight."
    )
    alt = f"Score of the fact and log-sum-exp of other keys by length for {', '.join(recalls)}"
    size = size_with_legend(list(recalls), 3.6, 9.0)
    return [Figure(f"{name}-heads", caption, alt, panels(drawn, columns=2), size)]
