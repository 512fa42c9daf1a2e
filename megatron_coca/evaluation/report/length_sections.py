"""The first sections: one row of results for each label, learning curves, perplexity, and loss with distance maps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import (
    FEW_POINTS,
    MOST_BANDS,
    Figure,
    Line,
    Panel,
    panels,
    size_with_legend,
    widened,
)
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.intervals import FEWEST_DOCUMENTS, RESAMPLES, estimate
from megatron_coca.evaluation.report.metrics import MARK, Metric, interrupted, mean_cell, missing_cell, value_cell
from megatron_coca.evaluation.report.published import method_key, tables_of
from megatron_coca.evaluation.report.reading import (
    Comparable,
    LoadedResult,
    Replicate,
    ResultGroup,
    Series,
    group_results,
)
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.report.retrieval_sections import PASSKEY, RETRIEVAL_COMPARABLE

PERPLEXITY_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "stride": "protocol.stride",
    "vocabulary": "protocol.vocabulary",
    "protocol": "protocol.text",
}
WINDOW, NLL, LOSSES = "window {}", attrgetter("nll"), attrgetter("nll_by_document")
PERPLEXITY = Metric(WINDOW, NLL, sums=LOSSES, log=True, lowest=True)
LOSS = Metric(WINDOW, NLL, "{:.4f}".format, sums=LOSSES, lowest=True)
ACCURACY = Metric(WINDOW, lambda cell: 100 * cell.accuracy, sums=attrgetter("correct_by_document"))


def baseline_of(group: ResultGroup, options: ReportOptions) -> Series | None:
    """The series that the others are compared with."""
    return next((series for series in group.series if series.label == options.baseline), None)


def with_baseline_note(table: Table, baseline: str | None) -> Table:
    """A table with numbers that could be marked: with a note on MARK."""
    reference = next((row for row in table.rows if row.name == baseline and not row.published), None)
    others = [row for row in table.rows if reference is not None and row is not reference]
    pairs = [pair for row in others for pair in zip(row.cells, reference.cells, strict=True)] if reference else []
    if not any(min(len(cell.sample), len(base.sample)) >= FEWEST_DOCUMENTS for cell, base in pairs):
        return table
    note = (
        f"{MARK} differs from {baseline} on these documents: the 95% interval of the difference of the loss "
        f"excludes 0 ({RESAMPLES:,} paired bootstrap samples of the documents). Losses are averaged over seeds first, "
        "so it speaks for other documents, not for other seeds; it is not corrected for the number of comparisons."
    )
    return replace(table, notes=(*table.notes, note))


@shared.grouped("perplexity", PERPLEXITY_COMPARABLE)
def perplexity_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """CoCA Table 1 and Figure 1: perplexity against the window, both logarithmic."""
    protocol, documents = group.first.protocol, group.first.documents
    alone = "" if protocol.vocabulary is None else f", softmax over the ids below {protocol.vocabulary} alone"
    measured = f"stride {protocol.stride}{alone}"
    begun = "" if documents.start is None else f", each after the token {documents.start}"
    metric = "perplexity" if options.papers else ""
    reference = baseline_of(group, options)
    main, *others = shared.length_table(
        name, "Perplexity by window", "perplexity at window", group, PERPLEXITY, metric, reference
    )
    cells = [(series, cell) for series in group.series for cell in series.cells()]
    complete = [cell for series, cell in cells if not interrupted(cell, series)]
    scored = f", {max(cell.tokens_scored for cell in complete)} tokens scored" if complete else ""
    main = replace(main, notes=(*main.notes, f"{measured}, {documents.count} documents{begun}{scored}"))
    main = with_baseline_note(main, options.baseline)
    figures: list[Figure] = []
    drawn, lines = shared.length_lines(group, PERPLEXITY.cell)
    if drawn:
        theirs = shared.published_lines(group, drawn, metric)
        caption = (
            f"Perplexity against the window, sliding by {protocol.stride} tokens; an infinite one leaves a gap."
            f"{'' if len(complete) == len(cells) else ' Interrupted windows are left out.'}"
            f"{shared.bands_text(drawn, cut_off=True)}{shared.DASHED if theirs else ''}"
        )
        panel = {"x_label": "window (tokens)", "y_label": "perplexity", "log_y": True}
        # The first plot of a report has been report.png since reports had one plot.
        file = "report" if name.endswith("-1") else name.replace("perplexity-", "report_")
        figures = shared.length_figure(file, "Perplexity by window", drawn, [*lines, *theirs], panel, caption)
    text = (f"Protocol: {protocol.text}; {measured}.",)
    caption = "Perplexity of variants as a multiple of that of the plain model"
    paired = shared.paired_tables(name, caption, group, PERPLEXITY, "{:.3f}".format)
    return ReportBlock(text, tuple(figures), (main, *paired, *others))


REPEATED = (
    "Su counts the tokens that are predicted right, on texts of the training length, on longer ones, and on longer "
    "ones that repeat their beginning (`--repeat`, a table of its own here)."
)


def has_map(group: ResultGroup) -> bool:
    methods = [method_key(series.header) for series in group.series]
    return any(method is not None and method.positions != "none" for method in methods)


@shared.grouped("rerope", PERPLEXITY_COMPARABLE, has_map)
def map_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """The tables of Su's pages on ReRoPE: loss and next-token accuracy by window."""
    published, reference = "loss" if options.papers else "", baseline_of(group, options)
    main, *others = shared.length_table(
        name, "Loss in nats per token by window", "loss at window", group, LOSS, published, reference
    )
    tables = [with_baseline_note(main, options.baseline), *others]
    caption, head = "Next-token accuracy in percent by window", "accuracy at window"
    tables += shared.length_table(f"{name}-accuracy", caption, head, group, ACCURACY)
    theirs = tables_of("next-token accuracy") if options.papers else []
    tables += [shared.published_table(table, group, name) for table in theirs]
    text = (REPEATED,) if theirs else ()
    return ReportBlock(text, (), tuple(tables))


# Summary

MULTIPLES = (2, 4, 16, 64)
"""Of the training length, at which the ratio to the perplexity at the training length is shown."""
SOLVED = 0.9
"""Accuracy from which a length counts as solved."""
Column = tuple[str, Callable[[Series], TableCell], bool]
"""Head, cell of a series, and whether the lowest number is the best."""


def summary_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """One row for each label, and columns for each group of comparable results."""
    rows: dict[str, list[TableCell]] = {item.result.label: [] for item in loaded}
    heads, lowest = [], []
    found = {
        task: group_results([item for item in loaded if item.result.task == task], comparable)
        for task, comparable in (("perplexity", PERPLEXITY_COMPARABLE), ("passkey", RETRIEVAL_COMPARABLE))
    }
    columns = [(group, column) for group in found["perplexity"] for column in perplexity_columns(group, options)]
    columns += [(group, ("passkey span", span_cell, False)) for group in found["passkey"] if group.measured]
    if len(columns) < 2:
        return []
    for group, (head, cell, low) in columns:
        heads.append(f"{head} ({group.differs})" if group.differs else head)
        lowest.append(low)
        by_label = {series.label: series for series in group.series}
        for label, cells in rows.items():
            cells.append(cell(by_label[label]) if label in by_label else EMPTY)
    table_rows = shared.mark_best([TableRow(label, tuple(cells)) for label, cells in rows.items()], lowest)
    note = (
        "L: the training length. At 2L and so on: the perplexity as a multiple of that at L. Passkey span: the largest "
        f"length, as a multiple of L, up to which the accuracy is at least {SOLVED} at every length measured; of "
        "several seeds their mean accuracy counts, and the spans of the seeds follow where they differ."
    )
    table = Table("summary", "Results by label", ("label", *heads), tuple(table_rows), (note,))
    return [ReportBlock(tables=(with_baseline_note(table, options.baseline),))]


def perplexity_columns(group: ResultGroup, options: ReportOptions) -> list[Column]:
    """Perplexity at the training length and the measured ratios to it; none where it was not measured."""
    reference = baseline_of(group, options)
    measured = {window / series.header.checkpoint.seq_length for series in group.series for (window,) in series.keys}
    if 1 not in measured:
        return []

    def at_length(series: Series) -> TableCell:
        return PERPLEXITY.cell(series, series.header.checkpoint.seq_length, reference=reference)

    columns: list[Column] = [("perplexity at L", at_length, True)]
    columns += [
        (f"ratio at {multiple}L", partial(ratio_cell, multiple=multiple), True)
        for multiple in MULTIPLES
        if multiple in measured
    ]
    return columns


def ratio_cell(series: Series, multiple: int) -> TableCell:
    """The perplexity at a multiple of the training length over that at it; of each seed, then averaged."""
    length = series.header.checkpoint.seq_length

    def logarithm(replicate: Replicate) -> float | None:
        short, long = (PERPLEXITY.of(replicate, window) for window in (length, multiple * length))
        return None if short is None or long is None else long - short

    return value_cell(series, f"window {multiple * length}", logarithm, log=True)


def span_cell(series: Series) -> TableCell:
    lengths = sorted(length for (length,) in series.keys)
    if not lengths:
        return missing_cell(series.replicates[0].why("all"))
    trained = series.header.checkpoint.seq_length
    spans = [
        span({length: cell.accuracy for (length,), cell in replicate.cells.items()}, trained)
        for replicate in series.replicates
        if replicate.cells
    ]
    means = {length: PASSKEY.cell(series, length).value or 0.0 for length in lengths}
    value = span(means, trained)
    detail = f"{min(spans):g}–{max(spans):g}" if min(spans) != max(spans) else ""
    return TableCell(f"{value:g}", value, detail, seeds=len(spans))


def span(accuracies: Mapping[int, float], trained: int) -> float:
    """The largest length as a multiple of `trained` up to which all accuracies are at least SOLVED, or 0."""
    longest = 0
    for length, accuracy in sorted(accuracies.items()):
        if accuracy < SOLVED:
            break
        longest = length
    return longest / trained


# Learning curves

CURVES: dict[str, Callable[[CurvePoint], float | None]] = {
    "training loss": lambda point: point.train_loss,
    "validation loss": lambda point: point.validation_loss,
}
SETTLED = 0.05
"""The share of the training after which losses set the range of the axis: the first fall is steep."""


def curve_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Training and validation loss against tokens, and the last losses of each label."""
    found = {
        name: {label: losses_by_tokens(curves, loss) for label, curves in options.curves.items()}
        for name, loss in CURVES.items()
    }
    drawn = {name: of_labels for name, of_labels in found.items() if any(of_labels.values())}
    if not drawn:
        return []
    rows = []
    for label in options.curves:
        cells = [
            mean_cell(known[max(known)], "{:.4f}".format) if known else TableCell("–")
            for known in (of_labels[label] for of_labels in drawn.values())
        ]
        tokens = max((point.tokens for curve in options.curves[label] for point in curve.points), default=0)
        rows.append(TableRow(label, (TableCell(f"{tokens:,}", float(tokens)), *cells)))
    header = ("label", "tokens", *(f"last {name}" for name in drawn))
    table = Table("training", "Loss at the end of training, nats per token", header, tuple(rows))
    borders = sorted({border for curves in options.curves.values() for curve in curves for border in curve.borders})
    figures = [
        curve_figure(f"training-{name.split()[0]}", name, of_labels, borders) for name, of_labels in drawn.items()
    ]
    return [ReportBlock(figures=tuple(figures), tables=(table,))]


def losses_by_tokens(curves: Sequence[Curve], loss: Callable[[CurvePoint], float | None]) -> dict[int, list[float]]:
    """The loss of each seed by the tokens trained on, where all seeds have one."""
    runs = [{point.tokens: loss(point) for point in curve.points if loss(point) is not None} for curve in curves]
    common = set(runs[0]).intersection(*runs) if runs else set()
    return {tokens: [value for run in runs if (value := run[tokens]) is not None] for tokens in sorted(common)}


def curve_figure(
    name: str, loss: str, by_label: Mapping[str, Mapping[int, Sequence[float]]], borders: Sequence[int] = ()
) -> Figure:
    lines, settled = [], []
    for style, (label, by_tokens) in enumerate(by_label.items()):
        means = [estimate(values) for values in by_tokens.values()]
        low, high = (tuple(getattr(mean, end) for mean in means) for end in ("low", "high"))
        millions = tuple(tokens / 1e6 for tokens in by_tokens)
        lines.append(Line(label, millions, tuple(mean.mean for mean in means), low, high, style=style))
        start = SETTLED * max(by_tokens, default=0)
        settled += [mean.mean for tokens, mean in zip(by_tokens, means, strict=True) if tokens >= start]
    finite = [value for value in settled if math.isfinite(value)] or [0.0, 1.0]
    margin = 0.04 * (max(finite) - min(finite))
    y_range = widened(min(finite) - margin, max(finite) + margin)
    lines = [line for line in lines if line.x]
    marks = {tokens / 1e6: "" if number else "stage begins" for number, tokens in enumerate(borders)}
    y_label = f"{loss} (nats per token)"
    panel = Panel(tuple(lines), "training tokens (millions)", y_label, marks=marks, y_range=y_range, linear_x=True)
    left_out = len(lines) > MOST_BANDS and any(len(line.x) > FEW_POINTS for line in lines)
    intervals = "; the table has its interval." if left_out else ", with its 95% t interval if there are several."
    caption = (
        f"{loss.capitalize()} against the tokens trained on, mean over seeds{intervals} The steep start is cut off."
    )
    alt = f"{loss.capitalize()} against tokens for {', '.join(by_label)}; the table has the last values"
    return Figure(
        name,
        caption,
        alt,
        panels([panel]),
        size_with_legend([*(line.label for line in lines), *filter(None, marks.values())]),
    )
