"""Plots against length: lines with their intervals, and heat maps."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib
from matplotlib import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogFormatter, NullLocator

from megatron_coca.evaluation.options import plot_text
from megatron_coca.evaluation.report.document import Figure

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DARK = ("#56B4E9", "#F0803C", "#2BC295", "#E39CC4", "#F0B429", "#7C9CF0", "#DDDDDD")
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color), less its yellow; brighter for dark ground."""

MARKERS = "osD^vP*X"
SIZES: dict[str, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "legend.fontsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 160,
    "svg.fonttype": "path",
}


def _colours(ink: str, ground: str, palette: tuple[str, ...]) -> dict[str, Any]:
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(grounds, ground),
        "grid.color": ink,
        "grid.alpha": 0.14,
        "grid.linewidth": 0.7,
        "axes.prop_cycle": cycler(color=palette),
    }


PRINT = SIZES | _colours("#1b1f24", "white", LIGHT)
ON_LIGHT = SIZES | _colours("#1b1f24", "none", LIGHT)
ON_DARK = SIZES | _colours("#e4e7ec", "none", DARK)


def png(figure: Figure) -> bytes:
    """For documents and print, on white ground."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, PRINT)):
        FigureCanvasAgg(_drawn(figure)).print_png(image, metadata={"Software": None})
    return image.getvalue()


def svg(figure: Figure, style: Mapping[str, Any]) -> bytes:
    """For the page, without ground; the same bytes every time."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, {**style, "svg.hashsalt": figure.name})):
        FigureCanvasSVG(_drawn(figure)).print_svg(image, metadata={"Date": None, "Creator": None})
    return image.getvalue()


def _drawn(figure: Figure) -> Canvas:
    canvas = Canvas(figsize=figure.size, layout="constrained")
    figure.draw(canvas)
    return canvas


LEGEND_COLUMNS = 2


@dataclass(frozen=True)
class Curve:
    """One line; a value that is not finite leaves a gap. `low` and `high` are ends of intervals.

    `label` is shown as it is, whatever matplotlib would make of it. `like` is the place of the line of ours that a
    published one has its colour from.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    like: int | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its curves; `marks` are values of x with a dashed line and its name."""

    curves: tuple[Curve, ...]
    x_label: str
    y_label: str
    title: str = ""
    log_y: bool = False
    log_x: bool = True
    marks: dict[float, str] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None
    level: float | None = None


def panels(given: Sequence[Panel], columns: int = 1) -> Callable[[Canvas], None]:
    """What draws panels in rows of `columns`, with one legend below."""

    def draw(canvas: Canvas) -> None:
        rows = math.ceil(len(given) / columns)
        places = canvas.subplots(rows, columns, squeeze=False, sharey=columns > 1).flat
        for axes, panel in zip(places, given, strict=False):
            draw_panel(axes, panel)
        for axes in list(places)[len(given) :]:
            axes.set_visible(False)
        handles = {
            label: handle
            for axes in canvas.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if handles:
            canvas.legend(
                handles.values(), handles.keys(), loc="outside lower center", ncols=min(LEGEND_COLUMNS, len(handles))
            )

    return draw


def height(curves: int, plot: float = 3.5) -> float:
    """Inches for a plot with a legend of so many lines below it."""
    return plot + 0.23 * math.ceil((curves + 1) / LEGEND_COLUMNS)


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Curves, marks, scales and labels of one panel."""
    for place, curve in enumerate(panel.curves):
        _draw_curve(axes, curve, place)
    for at, name in panel.marks.items():
        axes.axvline(at, color="grey", linestyle="--", linewidth=1, label=plot_text(name), zorder=1)
    if panel.level is not None:
        axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1, zorder=1)
    ticks = sorted({x for curve in panel.curves for x in curve.x})
    if panel.log_x:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short(tick) for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    axes.set(xlabel=plot_text(panel.x_label), ylabel=plot_text(panel.y_label), title=plot_text(panel.title))
    axes.grid(which="major")


def _draw_curve(axes: Axes, curve: Curve, place: int) -> None:
    finite, label = [y if math.isfinite(y) else math.nan for y in curve.y], plot_text(curve.label)
    colour = f"C{(place if curve.like is None else curve.like) % 7}"
    if curve.like is not None:
        hollow = {"marker": "o", "markerfacecolor": "none", "linestyle": (0, (2, 2)), "linewidth": 1.2, "alpha": 0.75}
        axes.plot(curve.x, finite, color=colour, label=label, zorder=2, **hollow)  # type: ignore[arg-type]
        return
    axes.plot(curve.x, finite, color=colour, marker=MARKERS[place % len(MARKERS)], label=label, zorder=3)
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def short(length: float) -> str:
    """A length as papers write it: 512, 1024, 16k."""
    whole = int(length)
    return f"{whole // 1024}k" if whole >= 8192 and whole % 1024 == 0 else f"{length:g}"


def heat_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], x_label: str, y_label: str
) -> Callable[[Canvas], None]:
    """What draws shares between 0 and 1 as coloured cells with their numbers; None is left empty."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        numbers = [[math.nan if value is None else value for value in line] for line in values]
        image = axes.imshow(numbers, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.spines[:].set_visible(False)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                text, ink = ("–", "grey") if value is None else (f"{value:.2f}", "white" if value < 0.55 else "black")
                axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
        canvas.colorbar(image, ax=axes, label="accuracy", shrink=0.9)

    return draw
