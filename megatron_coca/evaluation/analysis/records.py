"""The result file of `evaluate.py analyse`."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_coca.evaluation.documents import DocumentsRecord
from megatron_coca.evaluation.options import plot_text
from megatron_coca.evaluation.results import Cell, Record, Result, write_atomically

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
    """The distances, in tokens, at which the turned pair first crosses one of its three borders; lists are over j."""

    exists: list[Share]  # pairs that have this border at all
    mean: list[float | None]
    quantiles: list[Quantiles]
    within_training: list[Share]  # of all pairs: those that cross it within the training length
    within_length: list[Share]  # the same for the length that was analysed
    beyond_training: Share  # of all pairs and all j: those whose border lies beyond the training length


class Borders(Record):
    """Borders by the direction that causes them, with the frequencies theta_j (radians a token) they follow from.

    `k` is the end of the anomalous stretch of an anomalous pair, tau tokens away.
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
    pairs: list[int]  # how many were looked at, all layers and heads together


class Decay(Record):
    """Scores as softmax takes them, by distance in tokens."""

    distances: list[int]
    measured: Curve  # between the tokens of the text that are so far apart
    turned: Curve  # one and the same pairs of tokens, put so far apart
    falling: list[Share]  # of the turned pairs: whose score falls from a distance to the next one
    falling_mean: Share
    bound_rope: (
        list[float] | None
    )  # mean of RoPE's bound over the turned pairs; None where nothing, or more, is rotated
    bound_coca: list[float] | None  # mean of CoCA's strong bound
    above_rope: list[Share] | None  # turned pairs with |a| above their own bound
    above_coca: list[Share] | None


class Entropy(Record):
    """Entropy in nats of the attention weights of a query; means over documents and what is not named."""

    positions: list[int]  # of the queries looked at
    by_position: list[float]
    by_layer: list[float]
    by_head: list[list[float]]
    mean: float


class LengthAnalysis(Cell):
    """Everything that was found with inputs of one length."""

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
    """How was measured."""

    text: str
    pairs: int  # pairs of tokens for angles, over all documents
    queries: int  # positions for entropy and, at each distance, for scores; of one document
    seed: int
    quantiles: list[float]


class AnalysisResult(Result):
    """Analyses by length."""

    task: Literal["analyse"] = "analyse"
    protocol: AnalysisProtocol
    documents: DocumentsRecord
    results: list[LengthAnalysis]


MEDIAN, LOW, HIGH = 2, 0, 4
"""Places in the quantiles."""


def draw_angles(axes: Axes, result: AnalysisResult) -> None:
    """Density of the initial angles over all layers, heads and rotated pairs, a line for each length."""
    for cell in result.results:
        if cell.angles is None:
            continue
        counts = np.array(cell.angles.counts_by_pair).sum(axis=0)
        edges = np.degrees(cell.angles.edges)
        density = counts / max(1, counts.sum()) / np.diff(edges)
        axes.stairs(density, edges, label=f"{cell.length} tokens")
    axes.axvline(0, linestyle="--", linewidth=0.8, color="grey")
    axes.set(
        xlabel="initial angle from key to query, degrees", ylabel="density", title=f"{plot_text(result.label)}: angles"
    )
    axes.set_xticks(range(-180, 181, 60))
    _legend(axes)


def draw_reach(axes: Axes, result: AnalysisResult) -> None:
    """Reach of the anomaly by rotated pair at the first length, with the other two borders."""
    cell = _first(result, lambda cell: cell.borders is not None)
    if cell is not None and cell.borders is not None:
        named = {"reach tau (k)": cell.borders.k, "-q": cell.borders.minus_q, "q": cell.borders.q}
        for name, border in named.items():
            known = [(j, each) for j, each in enumerate(border.quantiles) if each is not None]
            if not known:
                continue
            planes = [j for j, _ in known]
            (line,) = axes.plot(planes, [each[MEDIAN] for _, each in known], label=f"{name}, median")
            low, high = ([each[at] for _, each in known] for at in (LOW, HIGH))
            axes.fill_between(planes, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axes.set_yscale("log")
    axes.axhline(result.checkpoint.seq_length, linestyle="--", linewidth=0.8, color="grey", label="training length")
    axes.set(xlabel="rotated pair j", ylabel="distance, tokens", title=f"{plot_text(result.label)}: rotary borders")
    _legend(axes)


def draw_decay(axes: Axes, result: AnalysisResult) -> None:
    """Mean |score| by distance at the longest length, between tokens of text and for pairs put apart, with the bounds."""
    if not result.results:
        return
    decay = result.results[-1].decay
    curves: dict[str, Sequence[float | None] | None] = {
        "tokens of text": decay.measured.mean_abs,
        "same pair put apart": decay.turned.mean_abs,
        "bound (CoCA)": decay.bound_coca,
        "bound (RoPE)": decay.bound_rope,
    }
    places = [max(distance, 0.5) for distance in decay.distances]
    for (name, values), style in zip(curves.items(), ("-", "-", "--", ":"), strict=True):
        if values is not None:
            axes.plot(places, [np.nan if value is None else value for value in values], style, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(
        xlabel="distance, tokens (0 at the left edge)", ylabel="mean |score|", title=f"{plot_text(result.label)}: decay"
    )
    _legend(axes)


def draw_entropy(axes: Axes, result: AnalysisResult) -> None:
    """Mean entropy of the attention weights by position of the query, a line for each length, and what equal weights
    would have.
    """
    for cell in result.results:
        axes.plot([at + 1 for at in cell.entropy.positions], cell.entropy.by_position, label=f"{cell.length} tokens")
    if result.results:
        seen = np.array([at + 1 for at in result.results[-1].entropy.positions])
        axes.plot(seen, np.log(seen), "--", color="grey", linewidth=0.8, label="equal weights")
    axes.axvline(result.checkpoint.seq_length, linestyle=":", linewidth=0.8, color="grey")
    axes.set_xscale("log")
    axes.set(
        xlabel="keys that the query sees", ylabel="entropy, nats", title=f"{plot_text(result.label)}: attention entropy"
    )
    _legend(axes)


FIGURES: dict[str, Callable[[Axes, AnalysisResult], None]] = {
    "angles": draw_angles,
    "reach": draw_reach,
    "decay": draw_decay,
    "entropy": draw_entropy,
}


def draw_files(result: AnalysisResult, path: Path) -> list[Path]:
    """One PNG for each figure beside the result file `path`, NAME.angles.png and so on; the files."""
    files = []
    for name, draw in FIGURES.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(), result)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=120, metadata={"Software": None})
        files.append(path.with_name(f"{path.name.removesuffix('.json')}.{name}.png"))
        write_atomically(files[-1], content.getvalue())
    return files


def _first(result: AnalysisResult, holds: Callable[[LengthAnalysis], bool]) -> LengthAnalysis | None:
    return next((cell for cell in result.results if holds(cell)), None)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
