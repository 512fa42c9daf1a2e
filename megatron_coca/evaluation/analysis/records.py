"""The result file of `evaluate.py analyse`, and its plots."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes

from megatron_coca.evaluation.axes import label_log_axis
from megatron_coca.evaluation.documents import DocumentsRecord
from megatron_coca.evaluation.options import plot_text
from megatron_coca.evaluation.results import Cell, Record, Result

Share = float | None
"""Between 0 and 1; None where there is nothing to take a share of."""
Quantiles = list[float] | None
"""At the protocol's `quantiles`; None where there is no value."""


class Angles(Record):
    """The initial angles Theta_j from k_j to q_j, in radians, in (-pi, pi].

    Counts and shares are over pairs of tokens; "by head" is [layer][head], "by pair" is a list over rotated pairs j.
    Where q_j or k_j is zero there is no angle, and `undefined` is the share of these; all other shares are of the rest.
    """

    edges: list[float]  # radians; the last bin holds the angles next to pi from both sides
    counts_by_head: list[list[list[int]]]
    counts_by_pair: list[list[int]]
    undefined: Share
    collinear: Share  # |Theta_j| within rounding of 0
    anomalous: Share
    anomalous_by_head: list[list[Share]]
    anomalous_by_pair: list[Share]
    largest: float | None  # radians, the largest |Theta_j|


class Border(Record):
    """The distances, in tokens, at which a rotated pair first crosses one of its three borders; lists are over j."""

    exists: list[Share]  # pairs that have this border at all
    mean: list[float | None]
    quantiles: list[Quantiles]
    within_training: list[Share]  # of all pairs: those that cross it within the training length
    within_length: list[Share]  # the same for the analysed length
    beyond_training: Share  # of all pairs and all j: those whose border lies beyond the training length


class Borders(Record):
    """Borders by the direction that causes them, and the frequencies theta_j (radians per token) they follow from.

    `k` is the end of the anomalous range of an anomalous pair, tau tokens away.
    """

    frequencies: list[float]
    k: Border
    minus_q: Border
    q: Border


class Curve(Record):
    """Scores by distance; lists are over the distances, None where no pair is visible."""

    mean: list[float | None]
    mean_abs: list[float | None]
    quantiles_abs: list[Quantiles]
    pairs: list[int]  # samples, all layers and heads together


class Decay(Record):
    """Attention scores, scaled and with their bias, by the distance of query and key in tokens."""

    distances: list[int]
    measured: Curve  # between tokens of the text at that distance
    turned: Curve  # the same pairs of tokens moved to every distance
    falling: list[Share]  # of the moved pairs: whose score falls from a distance to the next one
    falling_mean: Share
    bound_rope: list[float] | None  # mean of RoPE's bound over the moved pairs; None where rotation is not all
    bound_coca: list[float] | None  # mean of CoCA's strong bound
    above_rope: list[Share] | None  # moved pairs with |a| above their own bound
    above_coca: list[Share] | None


class Entropy(Record):
    """Entropy in nats of the attention weights of a query; means over documents and all dimensions not named."""

    positions: list[int]  # of the sampled queries
    by_position: list[float]
    by_layer: list[float]
    by_head: list[list[float]]
    mean: float


class LengthAnalysis(Cell):
    length: int
    documents: int
    angles: Angles | None  # None where nothing is rotated
    borders: Borders | None
    decay: Decay
    entropy: Entropy

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class AnalysisProtocol(Record):
    text: str
    pairs: int  # pairs of tokens for angles, over all documents
    queries: int  # of one document: positions for entropy, for scores at each distance, and pairs of the sweep
    seed: int  # of the drawn pairs
    quantiles: list[float]
    layers: str | None = None  # the type of layers, where they differ


class AnalysisResult(Result):
    task: Literal["analyse"] = "analyse"
    protocol: AnalysisProtocol
    documents: DocumentsRecord
    results: list[LengthAnalysis]


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
