"""The sections of numbers by length: perplexity, loss with maps, passkeys, needles, RULER, and Strict against Slack."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.perplexity import PerplexityResult, WindowResult
from megatron_coca.evaluation.report import tables as shared
from megatron_coca.evaluation.report.charts import (
    Curve,
    Figure,
    Panel,
    heat_map,
    height,
    interval_curve,
    panels,
    short_length,
)
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.published import TABLES, method_key
from megatron_coca.evaluation.report.reading import Comparable, LoadedResult, ResultGroup, Series, group_results
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.retrieval.records import PasskeyResult, RetrievalProtocol, Tally

PERPLEXITY_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "stride": "protocol.stride",
    "protocol": "protocol.text",
}
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

DASHED = " Dashed with hollow marks: the CoCA paper's numbers."
SHARES = (-0.03, 1.03)
"""The range of accuracies on an axis."""


# Perplexity and loss


def interrupted(series: Series, cell: WindowResult) -> str:
    """The note on a window of which only some documents are scored; empty for a complete one."""
    count = series.header.documents.count
    return f"interrupted: the first {cell.documents} of {count} documents" if cell.documents < count else ""


def window_cell(number: Callable[[WindowResult], TableCell]) -> Callable[[Series, int], TableCell]:
    """The table cell of a series at a window; an interrupted one is marked and not compared with others."""

    def cell(series: Series, window: int) -> TableCell:
        result = series.cells.get((window,))
        if result is None:
            return shared.missing_cell(series.why(f"window {window}"))
        note = interrupted(series, result)
        return replace(number(result), note=note, partial=bool(note))

    return cell


perplexity_cell = window_cell(lambda cell: shared.number_cell(cell.perplexity))
loss_cell = window_cell(lambda cell: shared.number_cell(cell.nll, ".4f"))
accuracy_cell = window_cell(lambda cell: shared.number_cell(cell.accuracy, scale=100))


@shared.grouped("perplexity", PERPLEXITY_COMPARABLE)
def perplexity_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """CoCA Table 1 and Figure 1: perplexity against the window, both logarithmic."""
    protocol, documents = group.first.protocol, group.first.documents
    metric = "perplexity" if papers else ""
    main, *others = shared.length_table(
        name, "Perplexity by window", "perplexity at window", group, perplexity_cell, metric, lowest=True
    )
    complete = [
        (series, [cell for cell in series.cells.values() if not interrupted(series, cell)]) for series in group.series
    ]
    drawn = [(series, cells) for series, cells in complete if cells]
    counts = [cell.tokens_scored for _, cells in drawn for cell in cells]
    scored = f", {max(counts)} tokens scored" if counts else ""
    main = replace(main, notes=(*main.notes, f"stride {protocol.stride}, {documents.count} documents{scored}"))
    figures = []
    if drawn:
        curves = [
            Curve(series.label, tuple(cell.window for cell in cells), tuple(cell.perplexity for cell in cells))
            for series, cells in drawn
        ]
        theirs = shared.published_curves(group, [series for series, _ in drawn], metric)
        whole = sum(len(series.cells) for series in group.series) == len(counts)
        caption = (
            f"Perplexity against the window, sliding by {protocol.stride} tokens; an infinite one leaves a gap."
            f"{'' if whole else ' Interrupted windows are left out.'}{DASHED if theirs else ''} "
            f"{shared.origin_text(group)}"
        )
        panel = {"x_label": "window (tokens)", "y_label": "perplexity", "log_y": True}
        # The first plot of a report has been report.png since reports had one plot.
        file = "report" if name.endswith("-1") else name.replace("perplexity-", "report_")
        figures.append(shared.length_figure(file, "Perplexity by window", group, [*curves, *theirs], panel, caption))
    text = (f"Protocol: {protocol.text}; stride {protocol.stride}.",)
    return ReportBlock(text, tuple(figures), (main, *others))


REPEATED = (
    "Su counts the tokens that are predicted right, on texts of the training length, on longer ones, and on longer "
    "ones that repeat their beginning (`--repeat`, a table of its own here)."
)


def has_map(group: ResultGroup) -> bool:
    methods = [method_key(series.header) for series in group.series]
    return any(method is not None and method.positions != "none" for method in methods)


@shared.grouped("rerope", PERPLEXITY_COMPARABLE, has_map)
def map_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """The tables of Su's pages on ReRoPE: loss and next-token accuracy by window."""
    tables = shared.length_table(
        *(name, "Loss in nats per token by window", "loss at window", group, loss_cell),
        metric="loss" if papers else "",
        lowest=True,
    )
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += shared.length_table(f"{name}-accuracy", caption, head, group, accuracy_cell, metric="", lowest=False)
    published = [table for table in TABLES if table.metric == "next-token accuracy"] if papers else []
    tables += [shared.published_table(table, group, name) for table in published]
    return ReportBlock((*([REPEATED] if published else []), shared.origin_text(group)), (), tuple(tables))


# Retrieval


def retrieval_text(protocol: RetrievalProtocol, cell: str) -> str:
    seen = dynamic_length_text(protocol.dynamic_length)
    return f"Protocol: {protocol.text}; {protocol.cases} cases a {cell}, seed {protocol.seed}; {seen}."


def tally_cell(tally: Tally | None) -> TableCell:
    if tally is None:
        return TableCell("–", detail="no case")
    return shared.number_cell(tally.accuracy, detail=f"{tally.low:.2f}–{tally.high:.2f}")


def passkey_cell(series: Series, length: int, tally: Callable[[Any], Tally | None] = lambda cell: cell) -> TableCell:
    cell = series.cells.get((length,))
    return tally_cell(tally(cell)) if cell is not None else shared.missing_cell(series.why(f"length {length}"))


@shared.grouped("passkey", RETRIEVAL_COMPARABLE)
def passkey_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """CoCA Table 2, Figure 4 as a table (keys inside and beyond the training length), and Figure 5 (four ranges)."""
    metric = "passkey" if papers else ""
    caption = "Passkey accuracy by length of the prompt, with 95% Wilson intervals"
    tables = shared.length_table(name, caption, "accuracy at length", group, passkey_cell, metric, lowest=False)
    text = (retrieval_text(group.first.protocol, "length"),)
    if not group.measured:
        return ReportBlock(text, (), tuple(tables))
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
    tables.insert(1, Table(f"{name}-split", caption, header, tuple(rows)))
    curves = [
        interval_curve(series.label, {cell.length: cell for cell in series.cells.values()}) for series in group.measured
    ]
    theirs = shared.published_curves(group, group.measured, metric)
    caption = (
        f"Passkey accuracy by length with 95% Wilson intervals.{DASHED if theirs else ''} {shared.origin_text(group)}"
    )
    panel = {"x_label": "length of the prompt (tokens)", "y_label": "accuracy", "y_range": SHARES}
    by_length = shared.length_figure(name, "Passkey accuracy by length", group, [*curves, *theirs], panel, caption)
    return ReportBlock(text, (by_length, passkey_ranges_figure(group, name)), tuple(tables))


def passkey_ranges_figure(group: ResultGroup, name: str) -> Figure:
    quarters = []
    for index, title in enumerate(("nearest quarter", "second quarter", "third quarter", "farthest quarter")):
        curves = []
        for series in group.measured:
            ranges = {
                cell.length: cell.ranges[index].tally for cell in series.cells.values() if index < len(cell.ranges)
            }
            known = {length: tally for length, tally in ranges.items() if tally is not None}
            curves.append(interval_curve(series.label, known))
        quarters.append(Panel(tuple(curves), "length (tokens)", "accuracy", title, y_range=SHARES))
    caption = (
        "Passkey accuracy by the key's distance from the end of the prompt, in quarters of the length (Figure 5 of the "
        "CoCA paper has four ranges too), with 95% Wilson intervals. Same checkpoints, data and machine."
    )
    alt = "Passkey accuracy by length, a panel for each quarter of the distance; report.json has the numbers"
    size = (6.0, 2.2 + height(len(group.measured)))
    return Figure(f"{name}-ranges", caption, alt, panels(quarters, columns=2), size)


@shared.grouped("needle", NEEDLE_COMPARABLE)
def needle_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
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
        if not series.cells:
            continue
        caption = (
            f"{series.label}: share of needles found, by length and by how deep they are hidden (0% is the beginning). "
            f"Trained at {trained}. {shared.series_origin_text(series)}"
        )
        values = [[cell.value for cell in row.cells] for row in rows]
        columns = [short_length(length) for length in lengths]
        draw = heat_map(percents, columns, values, "length of the prompt (tokens)", "depth of the needle")
        alt = f"Heat map of needles found by {series.label} over depth and length; the table has the numbers"
        figures.append(Figure(f"{name}-{index}", caption, alt, draw, (6.0, 1.4 + 0.3 * max(6, len(depths)))))
    return ReportBlock((retrieval_text(group.first.protocol, "cell"),), tuple(figures), tuple(tables))


def needle_cell(series: Series, length: int, depth: int) -> TableCell:
    cell = series.cells.get((length, depth))
    if cell is not None:
        return shared.number_cell(cell.accuracy)
    at = f"length {length}, depth {depth}%"
    return shared.missing_cell(series.why(at if at in series.missing else f"length {length}"))


@shared.grouped("ruler", RETRIEVAL_COMPARABLE)
def ruler_blocks(group: ResultGroup, name: str, papers: bool) -> ReportBlock:
    """A table of all tasks and their mean by length, and a plot of the means."""
    tasks, lengths = list(dict.fromkeys(task for task, _ in group.cell_keys())), group.lengths()

    def task_cell(series: Series, task: str, length: int) -> TableCell:
        cell = series.cells.get((task, length))
        return tally_cell(cell) if cell is not None else shared.missing_cell(series.why(f"{task}, length {length}"))

    def mean_cell(series: Series, length: int) -> TableCell:
        cells = [series.cells.get((task, length)) for task in tasks]
        known = [cell.accuracy for cell in cells if cell is not None]
        return shared.number_cell(fmean(known)) if known and len(known) == len(tasks) else TableCell("–")

    rows: list[TableRow] = []
    for task in tasks:
        ours = [(series.label, tuple(task_cell(series, task, length) for length in lengths)) for series in group.series]
        rows += shared.mark_best([TableRow(f"{task}: {label}", cells) for label, cells in ours], lowest=False)
    means = {series.label: tuple(mean_cell(series, length) for length in lengths) for series in group.series}
    rows += shared.mark_best([TableRow(f"mean: {label}", cells) for label, cells in means.items()], lowest=False)
    header = ("share found at length", *shared.length_header(lengths, group.training_lengths()))
    notes = ("Intervals are 95% Wilson intervals. A mean is of all tasks of the table, and absent where one is.",)
    table = Table(name, "Share of the expected strings in the answers", header, tuple(rows), notes)
    figures = []
    if group.measured:
        curves = []
        for series in group.measured:
            cells = zip(lengths, means[series.label], strict=True)
            known = {length: cell.value for length, cell in cells if cell.value is not None}
            curves.append(Curve(series.label, tuple(known), tuple(known.values())))
        caption = f"Mean over {len(tasks)} tasks ({', '.join(tasks)}) by length. {shared.origin_text(group)}"
        panel = {"x_label": "length of the prompt (tokens)", "y_label": "mean share found", "y_range": SHARES}
        figures.append(shared.length_figure(name, "Mean share found by length", group, curves, panel, caption))
    return ReportBlock((retrieval_text(group.first.protocol, "cell"),), tuple(figures), (table,))


# CoCA-Strict against CoCA-Slack

StrictMetric = tuple[str, str, type[Result], Comparable, Callable[[Series, int], TableCell]]
STRICT_METRICS: tuple[StrictMetric, ...] = (
    ("strict perplexity", "Perplexity", PerplexityResult, PERPLEXITY_COMPARABLE, perplexity_cell),
    (
        *("strict passkey", "Passkey accuracy", PasskeyResult, RETRIEVAL_COMPARABLE),
        lambda series, length: shared.number_cell(series.cells[length,].accuracy),
    ),
)
"""Metric of the published table, its name, the type of results, what must agree, and the cell of a series."""


def strict_blocks(loaded: Sequence[LoadedResult], papers: bool) -> list[ReportBlock]:
    """CoCA Table 3: a table for each group that has both forms with the same settings."""
    blocks = []
    for metric, title, kind, comparable, cell in STRICT_METRICS:
        results = [item for item in loaded if isinstance(item.result, kind)]
        for index, group in enumerate(group_results(results, comparable), 1):
            pairs = [(slack, strict) for slack in group.series for strict in group.series if is_pair(slack, strict)]
            if not pairs:
                continue
            name, trained = f"{metric.replace(' ', '-')}-{index}", group.training_lengths()
            theirs = [table for table in TABLES if table.metric == metric] if papers else []
            joined = [table for table in theirs if table.training_length in trained]
            measured = {length for pair in pairs for series in pair for (length,) in series.cells}
            lengths = sorted({*measured, *shared.published_lengths(joined)})
            rows = [row for pair in pairs for row in strict_rows(*pair, lengths, cell)]
            for table in joined:
                rows += shared.published_rows(table, lengths)
            caption, header = (
                f"{title}: CoCA-Slack, and what CoCA-Strict adds to it",
                shared.length_header(lengths, trained),
            )
            main = Table(name, caption, ("at length", *header), tuple(rows), (), tuple(map(shared.source_text, joined)))
            others = [shared.published_table(table, None, name) for table in theirs if table not in joined]
            blocks.append(ReportBlock((shared.origin_text(group),), (), (main, *others), group.heading))
    return blocks


def is_pair(slack: Series, strict: Series) -> bool:
    method = method_key(slack.header)
    return (
        method is not None
        and method.pos_emb == "coca"
        and replace(method, pos_emb="coca_strict") == method_key(strict.header)
        and slack.header.checkpoint.seq_length == strict.header.checkpoint.seq_length
    )


def strict_rows(
    slack: Series, strict: Series, lengths: Sequence[int], cell: Callable[[Series, int], TableCell]
) -> tuple[TableRow, TableRow]:
    first, second = (
        [cell(series, length) if (length,) in series.cells else EMPTY for length in lengths]
        for series in (slack, strict)
    )
    differences = []
    for before, after in zip(first, second, strict=True):
        if before.value is None or after.value is None:
            differences.append(EMPTY)
        elif before.partial or after.partial:
            differences.append(TableCell("–", note=before.note or after.note))
        else:
            differences.append(shared.number_cell(after.value - before.value, "+.2f"))
    return TableRow(slack.label, tuple(first)), TableRow(f"{strict.label}: difference", tuple(differences))
