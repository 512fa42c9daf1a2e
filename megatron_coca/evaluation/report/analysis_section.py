"""The section on the analysis of attention: a table, and the plots of each label."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.analysis.records import AnalysisResult, LengthAnalysis
from megatron_coca.evaluation.options import plot_text
from megatron_coca.evaluation.report import result_tables as shared
from megatron_coca.evaluation.report.charts import Figure, label_log_axis
from megatron_coca.evaluation.report.document import ReportBlock, Table, TableCell, TableRow
from megatron_coca.evaluation.report.metrics import Metric
from megatron_coca.evaluation.report.reading import Comparable, ResultGroup, Series
from megatron_coca.evaluation.report.result_tables import ReportOptions

LOW, MEDIAN, HIGH = 0, 2, 4
"""Indices of quantiles."""
REFERENCE = {"color": "grey", "linewidth": 0.8}
"""The style of reference lines."""


def _label(axes: Axes, result: AnalysisResult, x: str, y: str, title: str) -> None:
    axes.set(xlabel=x, ylabel=y, title=f"{plot_text(result.label)}: {title}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def draw_angles(axes: Axes, result: AnalysisResult) -> None:
    """Density of the initial angles over all layers, heads and rotated pairs, a line for each length."""
    for cell in result.results:
        if cell.angles is not None:
            counts, edges = np.array(cell.angles.counts_by_pair).sum(axis=0), np.degrees(cell.angles.edges)
            axes.stairs(counts / max(1, counts.sum()) / np.diff(edges), edges, label=f"{cell.length} tokens")
    axes.axvline(0, linestyle="--", **REFERENCE)  # type: ignore[arg-type]
    axes.set_xticks(range(-180, 181, 60))
    _label(axes, result, "initial angle from key to query (degrees)", "density (per degree)", "angles")


def draw_reach(axes: Axes, result: AnalysisResult) -> None:
    """Reach of the anomaly by rotated pair at the first length, with the other two borders."""
    borders = next((cell.borders for cell in result.results if cell.borders is not None), None)
    if borders is not None:
        for name, border in {"reach tau (k)": borders.k, "-q": borders.minus_q, "q": borders.q}.items():
            known = {j: values for j, values in enumerate(border.quantiles) if values is not None}
            if known:
                low, median, high = ([values[at] for values in known.values()] for at in (LOW, MEDIAN, HIGH))
                (line,) = axes.plot(list(known), median, label=f"{name}, median")
                axes.fill_between(list(known), low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    trained = result.checkpoint.seq_length
    axes.axhline(trained, linestyle="--", label="training length", **REFERENCE)  # type: ignore[arg-type]
    if borders is not None:
        label_log_axis(axes.yaxis, axes.dataLim.minposy, axes.dataLim.y1)
    _label(axes, result, "rotated pair j", "distance (tokens)", "rotary borders")


def draw_decay(axes: Axes, result: AnalysisResult) -> None:
    """Mean |score| by distance at the longest length, of sampled and swept pairs, with the bounds."""
    if not result.results:
        return
    decay = result.results[-1].decay
    curves: tuple[tuple[str, str, Sequence[float | None] | None], ...] = (
        ("tokens of text", "-", decay.measured.mean_abs),
        ("same pair put apart", "-", decay.turned.mean_abs),
        ("bound (CoCA)", "--", decay.bound_coca),
        ("bound (RoPE)", ":", decay.bound_rope),
    )
    distances = [max(distance, 0.5) for distance in decay.distances]
    for name, style, values in curves:
        if values is not None:
            axes.plot(distances, [np.nan if value is None else value for value in values], style, label=name)
    label_log_axis(axes.xaxis, axes.dataLim.minposx, axes.dataLim.x1)
    label_log_axis(axes.yaxis, axes.dataLim.minposy, axes.dataLim.y1)
    _label(axes, result, "distance (tokens; 0 at the left edge)", "mean |score|", "decay")


def draw_entropy(axes: Axes, result: AnalysisResult) -> None:
    """Mean entropy of the attention weights by position of the query, a line for each length, and the entropy of equal
    weights.
    """
    for cell in result.results:
        axes.plot([at + 1 for at in cell.entropy.positions], cell.entropy.by_position, label=f"{cell.length} tokens")
    if result.results:
        keys = np.array(result.results[-1].entropy.positions) + 1
        axes.plot(keys, np.log(keys), "--", label="equal weights", **REFERENCE)  # type: ignore[arg-type]
    axes.axvline(result.checkpoint.seq_length, linestyle=":", **REFERENCE)  # type: ignore[arg-type]
    label_log_axis(axes.xaxis, axes.dataLim.minposx, axes.dataLim.x1)
    _label(axes, result, "keys that the query sees", "entropy (nats)", "attention entropy")


FIGURES: dict[str, Callable[[Axes, AnalysisResult], None]] = {
    "angles": draw_angles,
    "reach": draw_reach,
    "decay": draw_decay,
    "entropy": draw_entropy,
}


ANALYSIS_COMPARABLE: Comparable = {
    "documents (sha256)": "documents.sha256",
    "pairs": "protocol.pairs",
    "queries": "protocol.queries",
    "seed": "protocol.seed",
    "protocol": "protocol.text",
}
FIGURE_TEXTS = {
    "angles": "Initial angles from key to query over all layers, heads and rotated pairs, before rotation.",
    "reach": "Distances at which rotated pairs first cross their borders; k is the reach tau of the anomaly.",
    "decay": "Mean |score| by distance, with the decay bounds.",
    "entropy": "Entropy of the attention weights by how many keys a query sees.",
}
ANALYSIS_COLUMNS: dict[str, Callable[[LengthAnalysis], float | None]] = {
    "anomalous pairs": lambda cell: cell.angles.anomalous if cell.angles is not None else None,
    "collinear pairs": lambda cell: cell.angles.collinear if cell.angles is not None else None,
    "largest angle, rad": lambda cell: cell.angles.largest if cell.angles is not None else None,
    "tau beyond training": lambda cell: cell.borders.k.beyond_training if cell.borders is not None else None,
    "score falls with distance": lambda cell: cell.decay.falling_mean,
    "entropy, nats": lambda cell: cell.entropy.mean,
}


def analysis_cell(series: Series, length: int, number: Callable[[LengthAnalysis], float | None]) -> TableCell:
    cell = Metric("length {}", number, "{:.3f}".format).cell(series, length)
    return TableCell("–") if cell.absent and (length,) in series.keys else cell


@shared.grouped("analysis", ANALYSIS_COMPARABLE)
def analysis_blocks(group: ResultGroup, name: str, options: ReportOptions) -> ReportBlock:
    """Section 2 and Figures 3 and 7 of the CoCA paper: a table, and the plots of each label."""
    rows = []
    for series in group.series:
        for length in group.lengths():
            cells = [analysis_cell(series, length, number) for number in ANALYSIS_COLUMNS.values()]
            rows.append(TableRow(f"{series.label}, {length} tokens", tuple(cells)))
    caption = "Anomalous pairs, falling scores and entropy (shares of pairs of tokens, means)"
    table = Table(name, caption, ("label", *ANALYSIS_COLUMNS), tuple(rows))

    def draw(kind: str, result: Any, canvas: Canvas) -> None:
        axes = canvas.subplots()
        FIGURES[kind](axes, result)
        axes.grid()

    figures = []
    for index, series in enumerate(group.series, 1):
        first, *others = series.replicates
        merged = series.header.model_copy(update={"results": list(first.cells.values())})
        seed = f" Seed {first.header.checkpoint.seed} only." if others else ""
        for kind in FIGURES if first.cells else ():
            caption = f"{series.label}: {FIGURE_TEXTS[kind]}{seed}"
            alt = f"{series.label}: {kind}"
            figures.append(Figure(f"{name}-{index}-{kind}", caption, alt, partial(draw, kind, merged)))
    text = (f"Protocol: {group.first.protocol.text}.",)
    return ReportBlock(text, tuple(figures), (table,))
