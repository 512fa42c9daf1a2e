"""Plots of a report: curves by length with intervals, heat maps, and logarithmic axes with labelled ends."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any, cast

import matplotlib
from matplotlib import cycler  # type: ignore[attr-defined]
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullLocator

from megatron_coca.evaluation.options import plot_text

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
"""The palette of Okabe and Ito (jfly.uni-koeln.de/color) without yellow."""
MARKERS = "osD^vP*X"
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
"""Line styles: the first seven lines are solid, the next seven have the same colours with dashes, and so on."""
MOST_BANDS = 4
"""Largest number of lines for which intervals are bands. With more lines, intervals are bars, or are left out if lines
have many points, because bands would hide each other."""
FEW_POINTS = 30
"""Largest number of points for which a line has markers and bars."""
MOST_BEYOND = 3.0
"""Factor by which an interval on a logarithmic axis may exceed the lines, because t intervals of two seeds can span
many decades."""
SHARES = (-0.03, 1.03)
"""Range of the axis for accuracies."""
INCH, LABEL = 12, 28
"""Number of legend characters in about one inch, and maximum number in one line of a label."""
DODGE, MOST_DODGE = 0.05, 0.5
"""Offset between neighbouring lines with bars, and its maximum for the outer lines: in octaves, or in tenths of a
linear axis.
"""
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


FOREGROUND = "#1b1f24"


def _style(background: str) -> dict[str, Any]:
    lines = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    faces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    grid = {"grid.color": FOREGROUND, "grid.alpha": 0.14, "grid.linewidth": 0.7}
    colours = dict.fromkeys(lines, FOREGROUND) | dict.fromkeys(faces, background)
    return SIZES | colours | grid | {"axes.prop_cycle": cycler(color=COLOURS)}


STYLES = {"print": _style("white"), "light": _style("none")}
"""Plot styles with a white or a transparent background."""


@dataclass(frozen=True)
class Figure:
    """A plot. `draw` fills an empty canvas of `size` inches; `alt` describes the plot for screen readers."""

    name: str
    caption: str
    alt: str
    draw: Callable[[Canvas], None]
    size: tuple[float, float] = (6.0, 4.2)


def svg(figure: Figure, style: str) -> bytes:
    """Return the plot as SVG in one of `STYLES`, with text as paths. The same figure always gives the same bytes."""
    image = io.BytesIO()
    with matplotlib.rc_context(cast(Any, {**STYLES[style], "svg.hashsalt": figure.name})):
        canvas = Canvas(figsize=figure.size, layout="constrained")
        figure.draw(canvas)
        FigureCanvasSVG(canvas).print_svg(image, metadata={"Date": None, "Creator": None})
    return image.getvalue()


@dataclass(frozen=True)
class Line:
    """One line, optionally with interval ends. A value that is not finite leaves a gap.

    `style` is the index of colour, dashes and marker; by default it is the line's index in the panel.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: int | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines. `marks` are named vertical lines at x values; `level` is the y of a horizontal line.

    x is a length on a logarithmic axis, unless `linear_x` is set.
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
    """Return a function that draws the panels in rows of `columns`, with a common y axis and one legend below."""

    def draw(canvas: Canvas) -> None:
        rows = math.ceil(len(given) / columns)
        all_axes = list(canvas.subplots(rows, columns, squeeze=False, sharey=columns > 1).flat)
        shown = all_axes[: len(given)]
        for index, (axes, panel) in enumerate(zip(shown, given, strict=True)):
            _draw_panel(axes, panel, columns)
            if index % columns:
                axes.set_ylabel("")
        if given[0].log_y:
            low, high = (min(axes.dataLim.minposy for axes in shown), max(axes.dataLim.y1 for axes in shown))
            for axes in shown:
                label_log_axis(axes.yaxis, low, high)
        for axes in all_axes[len(given) :]:
            axes.set_visible(False)
        handles = {
            label: handle for axes in shown for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if handles:
            marks = {_in_legend(name) for panel in given for name in panel.marks.values()}
            labels = sorted(handles, key=marks.__contains__)  # marks last
            ncols = legend_columns(labels, canvas.get_figwidth())
            canvas.legend(
                [handles[label] for label in labels], labels, loc="outside lower center", ncols=ncols, handlelength=3.5
            )

    return draw


def _in_legend(label: str) -> str:
    return plot_text(fill(label, LABEL))


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Return the number of legend columns that fit into `width` inches, with eight extra characters per label."""
    longest = min(LABEL, max(map(len, labels), default=0))
    return max(1, min(4, len(labels), int(INCH * width / (longest + 8))))


def size_with_legend(
    labels: Sequence[str], plot: float | None = None, width: float | None = None
) -> tuple[float, float]:
    """Return a plot's size in inches with a legend of `labels` below it. Plots of more than seven lines are larger."""
    many = len(labels) > len(COLOURS)
    width = width or (9.0 if many else 6.0)
    lines = sum(math.ceil(len(label) / LABEL) for label in labels)
    rows = math.ceil(lines / legend_columns(labels, width))
    return width, (plot or (4.6 if many else 3.5)) + 0.23 * rows


def _draw_panel(axes: Axes, panel: Panel, columns: int) -> None:
    finite = [y for line in panel.lines for y in line.y if math.isfinite(y)]
    bounds = (min(finite) / MOST_BEYOND, max(finite) * MOST_BEYOND) if panel.log_y and finite else (-math.inf, math.inf)
    for index, line in enumerate(panel.lines):
        _draw_line(axes, line, index if line.style is None else line.style, bounds, len(panel.lines), panel.linear_x)
    for x, name in panel.marks.items():
        label = _in_legend(name)
        axes.axvline(x, color="grey", linestyle="--", linewidth=1, label=label, zorder=1)
    if panel.level is not None:
        axes.axhline(panel.level, color="grey", linestyle=":", linewidth=1, zorder=1)
    if not panel.linear_x:
        ticks, most = sorted({x for line in panel.lines for x in line.x}), 8 if columns == 1 else 4
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [short_length(tick) for tick in ticks], rotation=45 if len(ticks) > most else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    title = plot_text(fill(panel.title, 75 // columns))
    axes.set(xlabel=plot_text(panel.x_label), ylabel=plot_text(panel.y_label), title=title)
    axes.grid(which="major")


def _draw_line(axes: Axes, line: Line, style: int, bounds: tuple[float, float], count: int, linear_x: bool) -> None:
    """Draw one of `count` lines, with its intervals clipped to `bounds`."""
    finite, places = [y if math.isfinite(y) else math.nan for y in line.y], line.x
    label = _in_legend(line.label)
    colour = f"C{style % len(COLOURS)}"
    look: dict[str, Any] = {"linestyle": DASHES[style // len(COLOURS) % len(DASHES)]}
    look |= {"marker": MARKERS[style % len(MARKERS)]} if len(line.x) <= FEW_POINTS else {"linewidth": 1.3}
    barred = bool(line.low) and len(line.x) <= FEW_POINTS and (count > MOST_BANDS or len(line.x) == 1)
    if barred:
        offset = min(MOST_DODGE, DODGE * (count - 1)) * (style % count / max(1, count - 1) - 0.5)
        reach = 0.1 * (line.x[-1] - line.x[0])
        places = tuple(x + offset * reach if linear_x else x * 2**offset for x in line.x)
    axes.plot(places, finite, color=colour, label=label, zorder=3, **look)
    if not line.low:
        return
    low, high = (
        [min(max(y, bounds[0]), bounds[1]) if math.isfinite(y) else math.nan for y in values]
        for values in (line.low, line.high)
    )
    if barred:
        axes.vlines(places, low, high, color=colour, alpha=0.8, linewidth=1.2, zorder=2)
    elif count <= MOST_BANDS:
        axes.fill_between(line.x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def short_length(length: float) -> str:
    whole = int(length)
    return f"{whole // 1024}k" if whole >= 8192 and whole % 1024 == 0 else f"{length:g}"


HeatMap = tuple[str, Sequence[Sequence[float | None]]]
"""A title, and accuracies by row and column; None leaves a cell empty."""


def heat_maps(
    maps: Sequence[HeatMap], rows: Sequence[str], heads: Sequence[str], x_label: str, y_label: str, columns: int = 1
) -> Callable[[Canvas], None]:
    """Return a function that draws heat maps in rows of `columns`: accuracies as coloured cells with their numbers."""

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
            axes.set_title(plot_text(fill(title, 75 // columns)), fontsize=12 if columns == 1 else 10)
            axes.spines[:].set_visible(False)
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    ink = "grey" if value is None else "white" if value < 0.55 else "black"
                    text = "–" if value is None else f"{value:.2f}"
                    size = 9 if columns == 1 else 7
                    axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=size)
        canvas.colorbar(image, ax=list(grid.flat), label="accuracy", shrink=0.9, aspect=max(20, 10 * len(grid)))

    return draw


# Logarithmic axes

LEAST_RATIO = 1.25
"""Smallest ratio between the ends of an axis, so that a difference of 2% takes at most a tenth of the axis."""
MOST_TICKS = 10
LARGEST_EXPONENT = 308.0
"""The largest power of ten that float64 can represent."""


def widened(low: float, high: float) -> tuple[float, float]:
    """Return axis ends for positive values from `low` to `high`, with a ratio of at least LEAST_RATIO."""
    if low <= 0 or high >= LEAST_RATIO * low:
        return low, high
    middle, reach = math.sqrt(low) * math.sqrt(high), math.sqrt(LEAST_RATIO)
    return middle / reach, middle * reach


def log_ticks(low: float, high: float) -> list[float]:
    """Return round positive ticks that cover `low` to `high`.

    Within a factor of 4 they are evenly spaced; otherwise they are 1, 2 and 5 times powers of ten, or only the powers.
    """
    if high < 4 * low:
        return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [factor * _power(exponent) for exponent in range(first, last) for factor in (1, 2, 5)] + [_power(last)]
    start = max(index for index, tick in enumerate(fine) if tick <= low or index == 0)
    end = min(index for index, tick in enumerate(fine) if tick >= high or index == len(fine) - 1)
    if end - start < MOST_TICKS:
        return fine[start : end + 1]
    step = math.ceil((last - first) / (MOST_TICKS - 1))
    return [_power(exponent) for exponent in range(first, last + step, step)]


def _power(exponent: float) -> float:
    return 10.0 ** min(exponent, LARGEST_EXPONENT)


def tick_text(tick: float) -> str:
    """Return a tick's label: `0.5`, `20000`, or a formula with a power of ten."""
    if 1e-3 <= tick < 1e5:
        return f"{tick:g}"
    mantissa, exponent = f"{tick:e}".split("e")
    factor = f"{float(mantissa):g}"
    return f"$10^{{{int(exponent)}}}$" if factor == "1" else rf"${factor}\cdot10^{{{int(exponent)}}}$"


def label_log_axis(axis: Axis, low: float, high: float) -> None:
    """Make an axis logarithmic, with labelled ticks at or beyond `low` and `high`, if these are a valid range."""
    if not 0 < low <= high < math.inf:
        return
    ticks = log_ticks(*widened(low, high))
    start, end = math.log10(ticks[0]), math.log10(ticks[-1])
    margin = 0.02 * (end - start)
    name = axis.axis_name  # type: ignore[attr-defined]
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (_power(start - margin), _power(end + margin))})
    axis.set_ticks(ticks, labels=list(map(tick_text, ticks)))
    axis.set_minor_locator(NullLocator())
