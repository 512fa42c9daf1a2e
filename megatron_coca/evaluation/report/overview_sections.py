"""Report sections that do not belong to a single task: a summary with one row per label, and learning curves."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.report.document import EMPTY, ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import mean_cell, missing_cell, value_cell
from megatron_coca.evaluation.report.plots.figures import Figure
from megatron_coca.evaluation.report.plots.log_axes import widened
from megatron_coca.evaluation.report.plots.looks import Member, numbered
from megatron_coca.evaluation.report.plots.panels import Line, Panel, arranged, panels
from megatron_coca.evaluation.report.reading import LoadedResult, Replicate, ResultGroup, Series, group_results
from megatron_coca.evaluation.report.result_tables import ReportOptions
from megatron_coca.evaluation.statistics import estimate
from megatron_coca.evaluation.tasks.perplexity.section import BY_WINDOW
from megatron_coca.evaluation.tasks.perplexity.task import PERPLEXITY
from megatron_coca.evaluation.tasks.recall.section import UNSHIFTED
from megatron_coca.evaluation.tasks.recall.task import RECALL
from megatron_coca.evaluation.tasks.retrieval.section import FOUND
from megatron_coca.evaluation.tasks.retrieval.task import PASSKEY

MULTIPLES = (2, 4, 16, 64)
"""Multiples of L, the training length. The summary shows the perplexity at each, divided by that at L."""
SOLVED = 0.9
"""Smallest accuracy at which a length counts as solved."""
OverviewColumn = tuple[str, Callable[[Series], TableCell], bool]
"""Head of a column, a function that makes its cell for a series, and whether the lowest number is the best."""


def summary_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Return a table with one row for each label, and columns for each group of comparable results."""
    rows: dict[str, list[TableCell]] = {item.result.label: [] for item in loaded}
    heads, lowest = [], []
    found = {
        task: group_results([item for item in loaded if item.result.task == task], comparable)
        for task, comparable in ((each.name, each.comparable) for each in (PERPLEXITY, PASSKEY, RECALL))
    }
    columns = [(group, column) for group in found["perplexity"] for column in perplexity_columns(group, options)]
    columns += [(group, ("passkey span", span_cell, False)) for group in found["passkey"] if group.measured]
    columns += [(group, column) for group in found["recall"] for column in recall_columns(group)]
    measured = [{series.label for group in groups for series in group.series} for groups in found.values() if groups]
    apart = len(measured) > 1 and not set.intersection(*measured)  # no label has results of all tasks
    if len(columns) < 2 or apart:
        return []
    for group, (head, cell, low) in columns:
        heads.append(f"{head} ({group.differs})" if group.differs else head)
        lowest.append(low)
        by_label = {series.label: series for series in group.series}
        for label, cells in rows.items():
            cells.append(cell(by_label[label]) if label in by_label else EMPTY)
    table_rows = shared.mark_best([TableRow(label, tuple(cells)) for label, cells in rows.items()], lowest)
    note = "L: the training length. Ratio at 2L and so on: the perplexity divided by that at L."
    if any(head.startswith("passkey span") for head in heads):
        note += (
            " Passkey span: the largest length, as a multiple of L, up to which the accuracy is at least "
            f"{SOLVED} at every measured length. With several seeds, their mean accuracy decides; the spans of single "
            "seeds follow if they differ."
        )
    table = Table("summary", "Results by label", ("label", *heads), tuple(table_rows), (note,))
    return [ReportBlock(tables=(shared.with_baseline_note(table, options.baseline),))]


def perplexity_columns(group: ResultGroup, options: ReportOptions) -> list[OverviewColumn]:
    """Return columns for the perplexity at the training length and for ratios to it; none if it was not measured."""
    reference = shared.baseline_of(group, options)
    measured = {window / series.header.checkpoint.seq_length for series in group.series for (window,) in series.keys}
    if 1 not in measured:
        return []

    def at_length(series: Series) -> TableCell:
        return BY_WINDOW.cell(series, series.header.checkpoint.seq_length, reference)

    columns: list[OverviewColumn] = [("perplexity at L", at_length, True)]
    columns += [
        (f"ratio at {multiple}L", partial(ratio_cell, multiple=multiple), True)
        for multiple in MULTIPLES
        if multiple in measured
    ]
    return columns


def recall_columns(group: ResultGroup) -> list[OverviewColumn]:
    """Return the column for the recall at the longest length; none if the models have several training lengths."""
    trained, lengths = group.training_lengths(), group.lengths()
    if len(trained) > 1 or not lengths:
        return []
    return [(f"recall at {lengths[-1] / min(trained):g}L", lambda series: UNSHIFTED.cell(series, lengths[-1]), False)]


def ratio_cell(series: Series, multiple: int) -> TableCell:
    """Return the perplexity at `multiple` times the training length L, divided by that at L, as a mean over seeds."""
    length = series.header.checkpoint.seq_length

    def logarithm(replicate: Replicate) -> float | None:
        short, long = (BY_WINDOW.of(replicate, window) for window in (length, multiple * length))
        return None if short is None or long is None else long - short

    return value_cell(series, f"window {multiple * length}", logarithm, log=True)


def span_cell(series: Series) -> TableCell:
    lengths = sorted(length for (length,) in series.keys)
    if not lengths:
        return missing_cell(series.replicates[0].why("all"))
    trained = series.header.checkpoint.seq_length
    spans = [
        span({length: FOUND.of(replicate, length) or 0.0 for (length,) in replicate.entries}, trained)
        for replicate in series.replicates
        if replicate.entries
    ]
    means = {length: FOUND.cell(series, length).value or 0.0 for length in lengths}
    value = span(means, trained)
    detail = f"{min(spans):g}–{max(spans):g}" if min(spans) != max(spans) else ""
    return TableCell(f"{value:g}", value, detail, seeds=len(spans))


def span(accuracies: Mapping[int, float], trained: int) -> float:
    """Return the largest length, in multiples of `trained`, up to which all accuracies reach SOLVED; 0 if none does."""
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
"""Share of the training, at its start, that the range of the axis ignores, because losses fall steeply there."""


def curve_blocks(loaded: Sequence[LoadedResult], options: ReportOptions) -> list[ReportBlock]:
    """Return training and validation loss against tokens, and a table of the last losses of each label."""
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
        curve_figure(f"training-{name.split()[0]}", name, of_labels, borders, options.members)
        for name, of_labels in drawn.items()
    ]
    return [ReportBlock(figures=tuple(figures), tables=(table,))]


def losses_by_tokens(curves: Sequence[Curve], loss: Callable[[CurvePoint], float | None]) -> dict[int, list[float]]:
    """Return the losses of all seeds by number of training tokens, for the token counts that all seeds share."""
    runs = [{point.tokens: loss(point) for point in curve.points if loss(point) is not None} for curve in curves]
    common = set(runs[0]).intersection(*runs) if runs else set()
    return {tokens: [value for run in runs if (value := run[tokens]) is not None] for tokens in sorted(common)}


def curve_figure(
    name: str,
    loss: str,
    by_label: Mapping[str, Mapping[int, Sequence[float]]],
    borders: Sequence[int],
    members: Mapping[str, Member],
) -> Figure:
    lines, settled = [], []
    for label, by_tokens in by_label.items():
        means = [estimate(values) for values in by_tokens.values()]
        low, high = (tuple(getattr(mean, end) for mean in means) for end in ("low", "high"))
        millions = tuple(tokens / 1e6 for tokens in by_tokens)
        lines.append(Line(label, millions, tuple(mean.mean for mean in means), low, high))
        start = SETTLED * max(by_tokens, default=0)
        settled += [mean.mean for tokens, mean in zip(by_tokens, means, strict=True) if tokens >= start]
    finite = [value for value in settled if math.isfinite(value)] or [0.0, 1.0]
    margin = 0.04 * (max(finite) - min(finite))
    y_range = widened(min(finite) - margin, max(finite) + margin)
    marks = {tokens / 1e6: "" if number else "stage begins" for number, tokens in enumerate(borders)}
    y_label = f"{loss} (nats per token)"
    panel = Panel((), "training tokens (millions)", y_label, marks=marks, y_range=y_range, linear_x=True)
    # A curve can belong to a label without results.
    known = {label: members.get(label) or Member(label, label, "", numbered(at)) for at, label in enumerate(by_label)}
    shown = arranged([line for line in lines if line.x], known, panel)
    caption = (
        f"{loss.capitalize()} against training tokens, mean over seeds, with its 95% t interval for several seeds. The "
        "steep start is cut off."
    )
    alt = f"{loss.capitalize()} against tokens for {', '.join(by_label)}; the table contains the last values"
    return Figure(name, caption, alt, *panels(shown))
