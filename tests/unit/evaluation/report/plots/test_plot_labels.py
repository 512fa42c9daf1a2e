"""Names in plots: those of marks and levels cover no curve, and leaders of curves cross no name."""

import random
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.path import Path as Outline
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from megatron_coca.evaluation.report.plots import figures
from megatron_coca.evaluation.report.plots.figures import COLUMN, PAGE, Figure, Layout, style
from megatron_coca.evaluation.report.plots.looks import COLOURS, LOOKS, Member, look_of, recoloured
from megatron_coca.evaluation.report.plots.panels import SHARES, Line, Panel, panels
from megatron_coca.evaluation.stretch import tables
from megatron_coca.evaluation.stretch.plans import read_plan
from megatron_coca.evaluation.stretch.records import read_results

ROOT = Path(__file__).parents[5]
LENGTHS = (64.0, 128.0, 256.0, 512.0, 1024.0)
MARKS = {64.0: "trained at 64"}


def drawn(figure: Figure, layout: Layout) -> Canvas:
    with style(layout):
        canvas = figures.drawn(figure, layout)
        FigureCanvasAgg(canvas)
        canvas.draw_without_rendering()
    return canvas


def names(axes: Any, quiet: bool) -> list[Any]:
    """The names of marks and levels if `quiet`, else those of curves."""
    texts = [text for text in axes.texts if isinstance(text, Annotation)]
    return [text for text in texts if (text.get_color() == figures.QUIET) is quiet]


def box(text: Any) -> Bbox:
    return Text.get_window_extent(text)


def outline(line: Any) -> Outline:
    return line.get_transform().transform_path(line.get_path())


def covered(canvas: Canvas) -> list[tuple[str, str]]:
    """Every name of a mark or level with a curve or a dotted line that passes through its letters."""
    return [
        (text.get_text(), str(line.get_label()))
        for axes in canvas.axes
        for text in names(axes, quiet=True)
        for line in axes.lines
        if outline(line).intersects_bbox(box(text), filled=False)
    ]


def shares(*curves: tuple[float, ...], level: float | None = 0.0625) -> Panel:
    lines = tuple(Line(f"line {number}", LENGTHS, y) for number, y in enumerate(curves))
    name = "" if level is None else "chance 0.06"
    return Panel(lines, "length (tokens)", "recall", y_range=SHARES, marks=MARKS, level=level, level_name=name)


FALLING, FLAT, RISING = (1.0, 0.62, 0.28, 0.14, 0.07), (1.0, 1.0, 1.0, 1.0, 1.0), (0.02, 0.06, 0.3, 0.8, 1.0)
LOW = (0.1, 0.07, 0.06, 0.06, 0.05)


@pytest.mark.parametrize("layout", [COLUMN, PAGE], ids=["column", "page"])
@pytest.mark.parametrize(
    "curves",
    [(FALLING,), (FALLING, FLAT), (FALLING, FLAT, RISING), (LOW, RISING), (LOW, FLAT), (LOW, FALLING, FLAT, RISING)],
)
def test_names_of_marks_and_levels_cover_no_curve(layout: Layout, curves: tuple[tuple[float, ...], ...]) -> None:
    canvas = drawn(Figure("name", "", "", *panels([shares(*curves)])), layout)
    assert [text.get_text() for text in names(canvas.axes[0], quiet=True)] == ["chance 0.06", "trained at 64"]
    assert not covered(canvas)


def test_names_find_the_free_places_among_random_curves() -> None:
    generator = random.Random(3)
    for _ in range(12):
        curves = [tuple(sorted((generator.random() for _ in LENGTHS), reverse=True)) for _ in range(3)]
        canvas = drawn(Figure("name", "", "", *panels([shares(*curves)])), PAGE)
        assert not covered(canvas), curves
        texts = [box(text) for text in names(canvas.axes[0], quiet=True)]
        assert not texts[0].overlaps(texts[1])
        area = canvas.axes[0].bbox
        assert all(area.containsx(x) and area.containsy(y) for each in texts for x, y in each.corners())


def test_every_name_stands_once_and_a_long_one_is_broken() -> None:
    """The second panel has the level, which the first panel lacks, and no room for its name on one line."""
    steep = Panel(
        (Line("line", LENGTHS, (16.0, 4.0, -4.0, -5.0, -5.0)), Line("other", LENGTHS, (9.0, 7.0, 5.0, 1.0, -5.5))),
        "length (tokens)",
        "margin",
        marks=MARKS,
        level=0.0,
        level_name="right and wrong are equal",
    )
    canvas = drawn(Figure("name", "", "", *panels([shares(FALLING, level=None), steep], common_y=False)), PAGE)
    shown = [[text.get_text() for text in names(axes, quiet=True)] for axes in canvas.axes]
    assert [[text.replace("\n", " ") for text in each] for each in shown] == [
        ["trained at 64"],
        ["right and wrong are equal"],
    ]
    assert "\n" in shown[1][0] and not covered(canvas)


def leaders(axes: Any) -> list[tuple[str, Outline]]:
    found = [(text.get_text(), text.arrow_patch) for text in names(axes, quiet=False) if text.arrow_patch is not None]
    return [(text, patch.get_transform().transform_path(patch.get_path())) for text, patch in found]


@pytest.mark.parametrize("layout", [COLUMN, PAGE], ids=["column", "page"])
def test_leaders_of_the_real_model_cross_no_name(layout: Layout) -> None:
    """Nine methods, of which seven end at nearly the same perplexity."""
    plan = read_plan(ROOT / "studies/real_model/plan.yml")
    result = read_results(ROOT / "studies/real_model", plan.methods)
    canvas = drawn(tables.figure(result), layout)
    assert not covered(canvas)
    assert sum(len(leaders(axes)) for axes in canvas.axes) >= 12
    for axes in (each for each in canvas.axes if each.get_visible()):
        lines = [line for line in axes.lines if line.get_zorder() == 3]
        assert len(lines) == 9 and len({line.get_color() for line in lines}) == 9
        for name, leader in leaders(axes):
            crossed = [
                text.get_text()
                for text in names(axes, quiet=False)
                if leader.intersects_bbox(box(text).padded(-1), filled=False)
            ]
            assert not crossed, f"the leader of {name}"


def test_methods_that_are_drawn_together_have_their_own_colours() -> None:
    methods = ("rerope+log_n", "yarn", "yarn", "dynamic", "rotary", "self_extend", "string", "linear", "rerope")
    found = recoloured([Member(f"{each} {at}", "", "", look_of(each), each) for at, each in enumerate(methods)])
    assert {member.look.colour for member in found} == set(COLOURS)
    assert len({(member.look.marker, member.look.dashes) for member in found}) == len(methods)
    assert [member.method for member in found] == list(methods)
    kept = {member.label: member.look for member in found}
    assert (
        kept["yarn 1"] == LOOKS["yarn"] and kept["rotary 4"] == LOOKS["rotary"] and kept["rerope 8"] == LOOKS["rerope"]
    )
    many = recoloured([Member(f"{at}", "", "", look_of("yarn"), "yarn") for at in range(14)])
    assert len({member.look for member in many}) == 14
