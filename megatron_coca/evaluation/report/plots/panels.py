"""Panels of lines by length (small multiples). Lines have labels at their ends, and bands for intervals."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import fill
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from megatron_coca.evaluation.labels import plot_text
from megatron_coca.evaluation.numbers import Number
from megatron_coca.evaluation.report.plots.figures import COLUMN, FAINT, FOREGROUND, QUIET, Drawing, Layout
from megatron_coca.evaluation.report.plots.labels import Box, Covered, place_name
from megatron_coca.evaluation.report.plots.log_axes import label_log_axis, spread_apart
from megatron_coca.evaluation.report.plots.looks import Look, Member, apart, numbered

FEW_POINTS = 30
"""Largest number of points for which a line has markers."""
MOST_BEYOND = 3.0
"""Factor by which an interval on a logarithmic axis may extend beyond the lines. The rest is cut off, because t
intervals of two seeds can span many decades."""
SHARES = (-0.03, 1.03)
"""Range of the axis for accuracies."""
MOST_TOGETHER = 4
"""Largest number of lines of different models in one panel; with more lines, each model has a panel."""
MOST_LENGTHS = 9
"""Largest number of lengths at which every length has a tick. With more lengths, powers of two have ticks."""
INSIDE = 0.72
"""Approximate height of a panel's axes as a share of the panel's height."""
CHARACTER = 0.6
"""Approximate width of a character in units of the text's size."""
DARKER = 0.72
"""Factor that darkens the colour of a line for the text beside it, which needs more contrast."""


def axis_of(number: Number) -> dict[str, Any]:
    """Return the fields of `Panel` that set the scale and range of the axis of a declared number."""
    return {"y_range": SHARES} if number.share else {"log_y": number.logarithm is not None}


@dataclass(frozen=True)
class Line:
    """One line, optionally with interval ends. A value that is not finite leaves a gap.

    `name` is written at the line's end; if it is empty, the label is written. If `look` is not set, the line's index in
    the panel determines how it looks.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    name: str = ""
    look: Look | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes with lines. `marks` are named vertical lines at x values.

    `level` is the y of a horizontal line, and `level_name` its name. `context` are lines of other panels, in grey.
    The x axis is logarithmic, unless `linear_x` is set. `side_by_side`: whether points of different lines at the same
    length are moved beside each other. Their intervals are then bars, because bands would overlap.
    """

    lines: tuple[Line, ...]
    x_label: str
    y_label: str
    title: str = ""
    log_y: bool = False
    marks: Mapping[float, str] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None
    level: float | None = None
    level_name: str = ""
    linear_x: bool = False
    side_by_side: bool = False
    context: tuple[Line, ...] = ()

    @property
    def named(self) -> bool:
        """Whether names are written at the ends of the lines. For a single line, the title is the name."""
        return len(self.lines) > 1 or not self.title


def arranged(lines: Sequence[Line], members: Mapping[str, Member], panel: Panel) -> list[Panel]:
    """Return copies of `panel` with the lines: one for all lines, or one for each base model and its variants.

    If a base model has a single line, its panel also shows the lines of the other models in grey.
    """
    looks = {line.label: members[line.label].look for line in lines}
    bases = dict.fromkeys(members[line.label].base for line in lines)
    if len(bases) == 1 or len(lines) <= MOST_TOGETHER:
        together = {member.label: member.look for member in apart([members[line.label] for line in lines])}
        one_base = len(bases) == 1 and len(lines) > 1
        shown = [
            replace(line, look=together[line.label], name=members[line.label].short if one_base else line.label)
            for line in lines
        ]
        return [replace(panel, lines=tuple(shown), title=next(iter(bases)) if one_base else panel.title)]
    made = []
    for base in bases:
        own = [
            replace(line, look=looks[line.label], name=members[line.label].short)
            for line in lines
            if members[line.label].base == base
        ]
        others = [line for line in lines if members[line.label].base != base] if len(own) == 1 else []
        title = base if len(own) > 1 else own[0].label
        made.append(replace(panel, lines=tuple(own), title=title, context=tuple(others)))
    return made


def _columns(given: Sequence[Panel], layout: Layout) -> int:
    if len(given) == 1:
        return 1
    if not any(panel.named for panel in given):
        return 2 * layout.columns if len(given) > MOST_TOGETHER else 2
    return layout.columns if len(given) <= MOST_TOGETHER or layout.columns == 1 else layout.columns + 1


def panels(given: Sequence[Panel], in_pairs: bool = False, common_y: bool = True) -> Drawing:
    """Return two functions: one draws the panels in rows with a common y axis, the other returns the height of the
    plot.

    `in_pairs`: whether two neighbouring panels form a pair, which stays in one row on a page. Without `common_y`, each
    panel has its own y axis.
    """

    def rows(layout: Layout) -> int:
        return math.ceil(len(given) / columns_in(layout))

    def columns_in(layout: Layout) -> int:
        return layout.columns if in_pairs else _columns(given, layout)

    def panel_height(layout: Layout) -> float:
        names = max((len(_names(panel, layout)) for panel in given), default=0)
        least = (1.4 if layout is COLUMN else 1.9) if rows(layout) > 1 else 2.1 if layout is COLUMN else 2.9
        return max(least, (names + 1) * layout.points * 1.15 / 72 / INSIDE)

    def height(layout: Layout) -> float:
        return rows(layout) * panel_height(layout) + 0.25

    def draw(canvas: Canvas, layout: Layout) -> None:
        columns = columns_in(layout)
        all_axes = list(
            canvas.subplots(
                rows(layout), columns, squeeze=False, sharey=common_y and len(given) > 1, sharex=len(given) > 1
            ).flat
        )
        shown = all_axes[: len(given)]
        ticks = _length_ticks({x for panel in given for line in panel.lines for x in line.x})
        room = _room(given, layout, columns)
        moved = [_side_by_side(panel) if panel.side_by_side else panel for panel in given]
        for index, (axes, panel) in enumerate(zip(shown, moved, strict=True)):
            _draw_panel(axes, panel, layout, columns, ticks, room)
            axes.tick_params(labelbottom=index + columns >= len(given))
            if (ends := _axis_ends(given if common_y else [panel])) is not None:
                label_log_axis(axes.yaxis, *ends)
        for axes, panel in zip(shown, moved, strict=True):  # the common y axis is known now
            axes.autoscale_view()
            if panel.named:
                _name_lines(axes, panel, layout, INSIDE * panel_height(layout) * 72)
            _draw_marks(axes, panel)
        for axes in all_axes[len(given) :]:
            axes.set_visible(False)
        _name_axes(canvas, shown, given, columns if common_y else 1)
        named: set[str] = set()
        for axes, panel in zip(shown, moved, strict=True):  # write each name once, in the first panel that has it
            if names := {panel.level_name, *panel.marks.values()} - {"", *named}:
                if not named:
                    canvas.draw_without_rendering()  # the places of names depend on the layout
                _name_marks(axes, panel, layout, names)
                named |= names

    return draw, height


def _side_by_side(panel: Panel) -> Panel:
    """Return the panel with its lines moved left or right, by at most a sixth of the distance to the doubled length."""
    last = max(1, len(panel.lines) - 1)
    steps = [(number / last - 0.5) / 3 for number in range(len(panel.lines))]
    lines = zip(panel.lines, steps, strict=True)
    return replace(panel, lines=tuple(replace(line, x=tuple(x * 2**step for x in line.x)) for line, step in lines))


def _names(panel: Panel, layout: Layout) -> list[str]:
    """Return the names at the ends of the lines, each on as many lines of text as it needs."""
    return [part for line in panel.lines for part in fill(line.name or line.label, layout.label).split("\n")]


def _axis_ends(given: Sequence[Panel]) -> tuple[float, float] | None:
    """Return the ends of a common logarithmic y axis. It shows all lines, and intervals up to a factor of MOST_BEYOND
    beyond the lines.
    """
    if not given[0].log_y:
        return None
    lines = [line for panel in given for line in (*panel.lines, *panel.context)]
    known = [y for line in lines for y in line.y if 0 < y < math.inf]
    if not known:
        return None
    beyond = [y for line in lines for y in (*line.low, *line.high) if 0 < y < math.inf]
    bounds = min(known) / MOST_BEYOND, max(known) * MOST_BEYOND
    wide = [*known, *(min(max(y, bounds[0]), bounds[1]) for y in beyond)]
    return min(wide), max(wide)


def _room(given: Sequence[Panel], layout: Layout, columns: int) -> float:
    """Return the approximate width of a panel's axes, without the names at the right, in units of the text's size."""
    named = [name for panel in given if panel.named for name in _names(panel, layout)]
    names = CHARACTER * max(map(len, named), default=0)
    return max(1.0, layout.width / columns * 72 / layout.points - names - 2.5)


def _draw_panel(axes: Axes, panel: Panel, layout: Layout, columns: int, ticks: Sequence[float], room: float) -> None:
    """Draw the lines of a panel. The width of its axes is `room` times the size of the text."""
    finite = [y for line in panel.lines for y in line.y if math.isfinite(y)]
    bounds = (min(finite) / MOST_BEYOND, max(finite) * MOST_BEYOND) if panel.log_y and finite else (-math.inf, math.inf)
    for line in panel.context:
        axes.plot(line.x, _finite(line.y), color=FAINT, alpha=0.45, linewidth=0.8, zorder=1.5)
    for index, line in enumerate(panel.lines):
        _draw_line(axes, line, line.look or numbered(index), bounds, panel.side_by_side)
    if not panel.linear_x:
        axes.set_xscale("log", base=2)
        texts = [short_length(tick) for tick in ticks]
        axes.set_xticks(ticks, _thinned(texts, int(room / CHARACTER / (max(map(len, texts), default=1) + 1))))
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    characters = int(1.15 * layout.width / columns * 72 / layout.points)
    axes.set_title(plot_text(fill(panel.title, characters)))
    axes.grid(which="major")


def _length_ticks(lengths: set[float]) -> list[float]:
    """Return the lengths, or the powers of two between them if there are many."""
    if len(lengths) <= MOST_LENGTHS or min(lengths) <= 0:
        return sorted(lengths)
    powers = range(math.ceil(math.log2(min(lengths))), math.floor(math.log2(max(lengths))) + 1)
    return [2.0**power for power in powers]


def _thinned(texts: list[str], most: int) -> list[str]:
    """Return the labels of ticks with some of them empty, so that about `most` at most remain. The last one remains."""
    step = math.ceil(len(texts) / max(1, most))
    return [text if (len(texts) - 1 - index) % step == 0 else "" for index, text in enumerate(texts)]


def _finite(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> list[float]:
    return [min(max(y, bounds[0]), bounds[1]) if math.isfinite(y) else math.nan for y in values]


def _draw_line(axes: Axes, line: Line, look: Look, bounds: tuple[float, float], bars: bool) -> None:
    """Draw a line, and its intervals as a band or as bars. The intervals are clipped to `bounds`."""
    many = len(line.x) > FEW_POINTS
    shape: dict[str, Any] = {"linewidth": 1.1} if many else {"marker": look.marker, "markeredgewidth": 0}
    dashes = (0, look.dashes) if look.dashes else "-"
    axes.plot(
        line.x, _finite(line.y), color=look.colour, label=plot_text(line.label), zorder=3, linestyle=dashes, **shape
    )
    if not line.low:
        return
    low, high = _finite(line.low, bounds), _finite(line.high, bounds)
    if bars or len(line.x) == 1:
        axes.vlines(line.x, low, high, color=look.colour, linewidth=1.2, zorder=2)
    else:
        axes.fill_between(line.x, low, high, color=look.colour, alpha=0.16, linewidth=0, zorder=2)


def _name_lines(axes: Axes, panel: Panel, layout: Layout, points: float) -> None:
    """Write every line's name to the right of its end. Names that would overlap move apart.

    The axes are `points` high.
    """
    ended = []
    for index, line in enumerate(panel.lines):
        known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        if known:
            text = fill(line.name or line.label, layout.label)
            share = min(1.0, max(0.0, _share(axes.yaxis, known[-1][1])))
            ended.append((share, known[-1], text, line.look or numbered(index)))
    ended.sort(key=lambda each: each[0])
    halves = [0.58 * layout.points * (text.count("\n") + 1) / points for _, _, text, _ in ended]
    places = spread_apart([share for share, *_ in ended], halves)
    beside = axes.transAxes + ScaledTranslation(0.14, 0, cast(Canvas, axes.figure).dpi_scale_trans)
    for place, (share, end, text, look) in zip(places, ended, strict=True):
        colour = tuple(DARKER * part for part in to_rgb(look.colour))
        moved = abs(place - share) > 0.015 or end[0] < max(x for line in panel.lines for x in line.x)
        axes.annotate(
            plot_text(text),
            xy=end,
            xytext=(1, place),
            textcoords=beside,
            color=colour,
            va="center",
            linespacing=0.95,
            fontsize=layout.points,
            # The leader ends at the left edge of the name. All names are beside the axes, so it crosses no name.
            arrowprops={
                "arrowstyle": "-",
                "color": look.colour,
                "linewidth": 0.6,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            }
            if moved
            else None,
            annotation_clip=False,
        )


def _share(axis: Axis, value: float) -> float:
    """Return the place of a value on an axis, from 0 to 1."""
    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        low, high, value = (math.log(max(end, 1e-300)) for end in (low, high, value))
    return (value - low) / (high - low) if high > low else 0.5


def _draw_marks(axes: Axes, panel: Panel) -> None:
    """Draw the dotted lines of the marks and of the level."""
    for x, name in panel.marks.items():
        axes.axvline(x, color=FOREGROUND, linestyle=(0, (1, 1.5)), linewidth=0.9, label=plot_text(name), zorder=1)
    if panel.level is not None:
        axes.axhline(panel.level, color=FOREGROUND, linestyle=(0, (1, 1.5)), linewidth=0.7, zorder=1)


def _name_marks(axes: Axes, panel: Panel, layout: Layout, names: Collection[str]) -> None:
    """Write the names of marks and of the level, if they are in `names`, at places with the smallest overlap.

    The canvas must have its final layout.
    """
    lines = [*panel.lines, *panel.context]
    bands = [((line.x, line.low), (line.x, line.high)) for line in panel.lines if line.low]
    covered = Covered.of(axes, [(line.x, line.y) for line in lines], bands)
    pixels = cast(Canvas, axes.figure).dpi / 72
    area, thin = axes.bbox, 0.5 * pixels
    for x in panel.marks:
        at = axes.transData.transform((x, 1.0))[0]
        covered.boxes.append(Box(at - thin, area.y0, at + thin, area.y1))
    if panel.level is not None:
        at = axes.transData.transform((1.0, panel.level))[1]
        covered.boxes.append(Box(area.x0, at - thin, area.x1, at + thin))
    gap = 0.4 * layout.points * pixels
    starts = [_share(axes.yaxis, line.y[0]) for line in panel.lines if line.y and math.isfinite(line.y[0])]
    high = bool(starts) and sum(starts) / len(starts) <= 0.5  # most curves begin low
    if panel.level is not None and panel.level_name in names:
        place_name(covered, plot_text(panel.level_name), "y", panel.level, gap, QUIET, last=high)
    for x, name in panel.marks.items():
        if name in names:
            place_name(covered, plot_text(name), "x", x, gap, QUIET, last=high)


def _name_axes(canvas: Canvas, shown: Sequence[Axes], given: Sequence[Panel], columns: int) -> None:
    """Name the axes once for the plot if all panels have the same names, otherwise at each panel."""
    for setter, names in (("supxlabel", [panel.x_label for panel in given]), ("supylabel", [p.y_label for p in given])):
        if len(given) > 1 and len(set(names)) == 1:
            getattr(canvas, setter)(plot_text(names[0]), fontsize=matplotlib.rcParams["axes.labelsize"])
        else:
            for index, (axes, name) in enumerate(zip(shown, names, strict=True)):
                if setter == "supxlabel":
                    axes.set_xlabel(plot_text(name))
                elif index % columns == 0:
                    axes.set_ylabel(plot_text(name))


def short_length(length: float) -> str:
    whole = int(length)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else f"{length:g}"
