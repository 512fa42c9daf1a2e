"""Plots of a report: curves against length with their intervals, and heat maps."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import matplotlib
from matplotlib import cycler  # type: ignore[attr-defined]
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogFormatter, NullLocator

from megatron_coca.evaluation.options import plot_text

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
DARK = ("#56B4E9", "#F0803C", "#2BC295", "#E39CC4", "#F0B429", "#7C9CF0", "#DDDDDD")
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color) without yellow; brighter for a dark background."""
MARKERS = "osD^vP*X"
LEGEND_COLUMNS = 2
MOST_BEYOND = 3.0
"""Factor by which a band on a logarithmic axis may exceed the lines: intervals of two seeds span many decades."""
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


def _style(foreground: str, background: str, palette: tuple[str, ...]) -> dict[str, Any]:
    lines = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    faces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    grid = {"grid.color": foreground, "grid.alpha": 0.14, "grid.linewidth": 0.7}
    colours = dict.fromkeys(lines, foreground) | dict.fromkeys(faces, background)
    return SIZES | colours | grid | {"axes.prop_cycle": cycler(color=palette)}


PRINT_STYLE = _style("#1b1f24", "white", LIGHT)
SCREEN_STYLES = {"light": _style("#1b1f24", "none", LIGHT), "dark": _style("#e4e7ec", "none", DARK)}


@dataclass(frozen=True)
class Figure:
    """A plot: `draw` fills an empty canvas of `size` inches, `alt` describes it for screen readers."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Canvas], None]
    size: tuple[float, float] = (6.0, 4.2)


def _drawn(figure: Figure) -> Canvas:
    canvas = Canvas(figsize=figure.size, layout="constrained")
    figure.draw(canvas)
    return canvas


def png(figure: Figure) -> bytes:
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, PRINT_STYLE)):
        FigureCanvasAgg(_drawn(figure)).print_png(image, metadata={"Software": None})
    return image.getvalue()


def svg(figure: Figure, style: str) -> bytes:
    """The plot in one of `SCREEN_STYLES` on a transparent background, text as paths; the same bytes every time."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, {**SCREEN_STYLES[style], "svg.hashsalt": figure.name})):
        FigureCanvasSVG(_drawn(figure)).print_svg(image, metadata={"Date": None, "Creator": None})
    return image.getvalue()


def data_uri(image: bytes) -> str:
    """An SVG image inside a page."""
    return "data:image/svg+xml;base64," + base64.b64encode(image).decode()


@dataclass(frozen=True)
class Line:
    """One line with optional ends of intervals; a value that is not finite leaves a gap.

    `like` is the index of our line whose colour a published one takes, `style` the number of the colour and marker,
    by default the index in its panel.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    like: int | None = None
    style: int | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines; `marks` are named vertical lines at values of x, `level` a horizontal one.

    x is a length, on a logarithmic axis, unless `linear_x`.
    """

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    title: str = ""
    log_y: bool = False
    marks: Mapping[float, str] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None
    level: float | None = None
    linear_x: bool = False


def panels(given: Sequence[Panel], columns: int = 1) -> Callable[[Canvas], None]:
    """Return a function that draws panels in rows of `columns`, with one legend below."""

    def draw(canvas: Canvas) -> None:
        rows = math.ceil(len(given) / columns)
        all_axes = list(canvas.subplots(rows, columns, squeeze=False, sharey=columns > 1).flat)
        for index, (axes, panel) in enumerate(zip(all_axes, given, strict=False)):
            _draw_panel(axes, panel, most_ticks=8 if columns == 1 else 4)
            if index % columns:
                axes.set_ylabel("")
        for axes in all_axes[len(given) :]:
            axes.set_visible(False)
        handles = {
            label: handle
            for axes in canvas.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if handles:
            marks = {plot_text(name) for panel in given for name in panel.marks.values()}
            labels = sorted(handles, key=marks.__contains__)  # marks last
            shown = min(max(LEGEND_COLUMNS, columns), len(labels))
            canvas.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=shown)

    return draw


def height(lines: int, plot: float = 3.5, columns: int = LEGEND_COLUMNS) -> float:
    """Inches for a plot with a legend of that many entries below it."""
    return plot + 0.23 * math.ceil((lines + 1) / columns)


def _draw_panel(axes: Axes, panel: Panel, most_ticks: int) -> None:
    finite = [y for line in panel.lines for y in line.y if math.isfinite(y)]
    bounds = (min(finite) / MOST_BEYOND, max(finite) * MOST_BEYOND) if panel.log_y and finite else (-math.inf, math.inf)
    for index, line in enumerate(panel.lines):
        _draw_line(axes, line, index if line.style is None else line.style, bounds, with_markers=not panel.linear_x)
    for x, name in panel.marks.items():
        axes.axvline(x, color="grey", linestyle="--", linewidth=1, label=plot_text(name), zorder=1)
    if panel.level is not None:
        axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1, zorder=1)
    if not panel.linear_x:
        ticks = sorted({x for line in panel.lines for x in line.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [short_length(tick) for tick in ticks], rotation=45 if len(ticks) > most_ticks else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    axes.set(xlabel=plot_text(panel.x_label), ylabel=plot_text(panel.y_label), title=plot_text(panel.title))
    axes.grid(which="major")


def _draw_line(axes: Axes, line: Line, index: int, bounds: tuple[float, float], with_markers: bool) -> None:
    """`bounds` cut off the band."""
    finite = [y if math.isfinite(y) else math.nan for y in line.y]
    label, colour = plot_text(line.label), f"C{(index if line.like is None else line.like) % 7}"
    if line.like is not None:
        hollow = {"marker": "o", "markerfacecolor": "none", "linestyle": (0, (2, 2)), "linewidth": 1.2, "alpha": 0.75}
        axes.plot(line.x, finite, color=colour, label=label, zorder=2, **hollow)  # type: ignore[arg-type]
        return
    marked: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)]} if with_markers else {"linewidth": 1.2}
    axes.plot(line.x, finite, color=colour, label=label, zorder=3, **marked)
    if line.low:
        low, high = (
            [min(max(y, bounds[0]), bounds[1]) if math.isfinite(y) else math.nan for y in values]
            for values in (line.low, line.high)
        )
        axes.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def short_length(length: float) -> str:
    whole = int(length)
    return f"{whole // 1024}k" if whole >= 8192 and whole % 1024 == 0 else f"{length:g}"


HeatMap = tuple[str, Sequence[Sequence[float | None]]]
"""Title and accuracies by row and column; None leaves a cell empty."""


def heat_maps(
    maps: Sequence[HeatMap], rows: Sequence[str], heads: Sequence[str], x_label: str, y_label: str, columns: int = 1
) -> Callable[[Canvas], None]:
    """Return a function that draws accuracies as coloured cells with their numbers, in rows of `columns` maps."""

    def draw(canvas: Canvas) -> None:
        grid = canvas.subplots(math.ceil(len(maps) / columns), columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(maps):
                axes.set_visible(False)
                continue
            title, values = maps[index]
            numbers = [[math.nan if value is None else value for value in line] for line in values]
            image = axes.imshow(numbers, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
            lowest = index + columns >= len(maps)
            axes.set_xticks(
                range(len(heads)), heads if lowest else [""] * len(heads), rotation=45 if columns > 1 else 0
            )
            axes.set_yticks(range(len(rows)), list(map(plot_text, rows)))
            axes.set(xlabel=x_label if lowest else "", ylabel="" if index % columns else y_label)
            axes.set_title(plot_text(title), fontsize=12 if columns == 1 else 10)
            axes.spines[:].set_visible(False)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    ink = "grey" if value is None else "white" if value < 0.55 else "black"
                    text = "–" if value is None else f"{value:.2f}"
                    size = 9 if columns == 1 else 7
                    axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=size)
        canvas.colorbar(image, ax=list(grid.flat), label="accuracy", shrink=0.9, aspect=max(20, 10 * len(grid)))

    return draw
