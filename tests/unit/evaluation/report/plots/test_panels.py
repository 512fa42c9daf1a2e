"""Plots and markers of a report of many series: looks, panels, names of lines, ticks, single lengths, bold numbers."""

import math
import random
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.text import Annotation, Text

from megatron_coca.evaluation.report.curves import find_curves
from megatron_coca.evaluation.report.document import ReportBlock, Section, TableCell, TableRow
from megatron_coca.evaluation.report.plots import figures
from megatron_coca.evaluation.report.plots.figures import COLUMN, PAGE, Figure, Layout, images, style
from megatron_coca.evaluation.report.plots.log_axes import LEAST_RATIO, log_ticks, spread_apart, tick_text, widened
from megatron_coca.evaluation.report.plots.looks import LOOKS, apart, look_of, members
from megatron_coca.evaluation.report.plots.panels import Line, Panel, panels
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.result_tables import mark_best
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.statistics import Estimate, difference_interval, wilson_interval
from tests.unit.evaluation.report_cases import (
    DOCUMENTS,
    NTK,
    ablation,
    analysis,
    every_result,
    needle,
    perplexity,
    sections_of,
    window,
    write,
)


def sections(folder: Path, results: dict[str, Result], **options: Any) -> dict[str, Section]:
    built = sections_of(write(folder, results), papers=False, **options)
    return {section.name: section for section in built}


@cache
def drawn(figure: Figure, layout: Layout = PAGE) -> Canvas:
    with style(layout):
        canvas = figures.drawn(figure, layout)
        FigureCanvasAgg(canvas)
        canvas.draw_without_rendering()
    return canvas


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Section]:
    results, curves = ablation()
    return sections(tmp_path_factory.mktemp("many"), results, curves=curves, baseline="Method A")


def lines_of(axes: Any) -> list[Any]:
    """The lines of one panel in colour; other models are grey, and marks are dotted."""
    return [line for line in axes.lines if line.get_zorder() == 3]


def test_twelve_models_are_twelve_panels(many: dict[str, Section]) -> None:
    for name in ("training", "perplexity"):
        shown = [axes for axes in drawn(many[name].blocks[0].figures[0]).axes if axes.get_visible()]
        assert len(shown) == 12
        for axes in shown:
            assert len(lines_of(axes)) == 1 and len(axes.lines) >= 12, "one model in colour, eleven in grey"
            assert len(axes.collections) == 1, "its interval as a band"


def test_few_points_have_markers_and_many_have_none(many: dict[str, Section]) -> None:
    training, validation = many["training"].blocks[0].figures
    for figure, marked in ((training, False), (validation, True)):
        canvas = drawn(figure)
        assert all((line.get_marker() != "None") is marked for axes in canvas.axes for line in lines_of(axes))
        texts = [text.get_text() for text in canvas.texts]
        assert any("million" in text for text in texts) and any("nats per token" in text for text in texts)


def test_a_method_has_one_look_in_every_figure(tmp_path: Path) -> None:
    built = sections(tmp_path, every_result())
    found: dict[str, set[Any]] = {}
    for figure in (figure for section in built.values() for block in section.blocks for figure in block.figures):
        for axes in drawn(figure).axes:
            for line in lines_of(axes):
                found.setdefault(str(line.get_label()), set()).add(line.get_color())
    assert found["RoFormer"] == {LOOKS["rotary"].colour} and found["RoFormer + dynamic NTK"] == {
        LOOKS["dynamic"].colour
    }
    assert all(len(colours) == 1 for colours in found.values()), found


def test_variants_belong_to_their_weights_and_look_different(tmp_path: Path) -> None:
    results = {
        "a": perplexity("CoCA", {512: 2.0}, checkpoint__identity="one"),
        "b": perplexity("CoCA + NTK 4", {512: 2.0}, checkpoint__identity="one", overrides=NTK),
        "c": perplexity("CoCA + NTK 8", {512: 2.0}, checkpoint__identity="one", overrides=NTK),
        "d": perplexity("Other", {512: 2.0}, checkpoint__identity="two"),
    }
    found = members(results.values())
    assert {label: (member.base, member.variant) for label, member in found.items()} == {
        "CoCA": ("CoCA", ""),
        "CoCA + NTK 4": ("CoCA", "NTK 4"),
        "CoCA + NTK 8": ("CoCA", "NTK 8"),
        "Other": ("Other", ""),
    }
    assert found["CoCA + NTK 4"].look.colour == found["CoCA + NTK 8"].look.colour
    assert len({(member.look.marker, member.look.dashes) for member in found.values() if member.base == "CoCA"}) == 3
    assert look_of("a method of your own") == look_of("a method of your own")
    assert len({member.look for member in apart([found["Other"]] * 8)}) == 8


def test_names_of_lines_move_apart_and_stay_inside() -> None:
    generator = random.Random(2)
    for _ in range(200):
        places = sorted(generator.random() for _ in range(generator.randrange(1, 12)))
        found = spread_apart(places, [0.04] * len(places))
        assert all(later - earlier > 0.08 - 1e-6 for earlier, later in pairwise(found))
        assert found[0] > 0.04 - 1e-6 and found[-1] < 0.96 + 1e-6
    assert spread_apart([0.2, 0.8], [0.04, 0.04]) == pytest.approx([0.2, 0.8])


def test_every_kind_of_file() -> None:
    """Text of a PDF stays text in an embedded font, as wide as a column."""
    lines = (Line("one", (512.0, 1024.0), (1.0, 0.5)), Line("two", (512.0, 1024.0), (1.0, 0.6)))
    figure = Figure("name", "", "", *panels([Panel(lines, "length", "accuracy")]))
    found = images(figure)
    assert found.keys() == {".svg", "-narrow.svg", ".pdf", "-wide.pdf", ".png"} and found == images(figure)
    assert b"/FontFile2" in found[".pdf"] and f"/MediaBox [ 0 0 {72 * COLUMN.width:g}".encode() in found[".pdf"]
    assert found[".png"].startswith(b"\x89PNG") and b"<text" not in found[".svg"]


def overlapping(boxes: list[Any]) -> list[Any]:
    return [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def check_labels(figure: Figure) -> None:
    """In both layouts, labels reach the ends of axes, names do not overlap, and no text is cut off."""
    for layout in (COLUMN, PAGE):
        canvas = drawn(figure, layout)
        width, height = canvas.bbox.width, canvas.bbox.height
        texts = [*canvas.texts]
        for axes in (each for each in canvas.axes if each.get_visible()):
            for axis in (axes.xaxis, axes.yaxis):
                labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
                low, high = sorted(axis.get_view_interval())
                shown = [label for label in labels if low <= label.get_unitless_position()[axis is axes.yaxis] <= high]
                boxes = [label.get_window_extent() for label in shown]
                assert not overlapping(boxes), (figure.name, layout, [label.get_text() for label in shown])
                if axis.get_scale() == "log" and axis is axes.yaxis and shown:
                    ends = [label.get_unitless_position()[1] for label in (shown[0], shown[-1])]
                    assert math.log(min(ends) / low) < 0.1 * math.log(high / low), figure.name
                    assert math.log(high / max(ends)) < 0.1 * math.log(high / low), figure.name
            names = [text for text in axes.texts if isinstance(text, Annotation)]
            assert not overlapping([Text.get_window_extent(text) for text in names]), (figure.name, layout)
            texts += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *names]
        for text in (text for text in texts if text.get_text()):
            box = Text.get_window_extent(text)
            inside = box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1
            assert inside, (figure.name, layout, text.get_text())


@pytest.mark.parametrize("name", ["perplexity", pytest.param("training", marks=pytest.mark.slow)])
def test_labels_of_an_ablation(many: dict[str, Section], name: str) -> None:
    for figure in (figure for block in many[name].blocks for figure in block.figures):
        check_labels(figure)


def test_labels_of_every_section(tmp_path: Path) -> None:
    chosen = {name: result for name, result in every_result().items() if name != "needle"}
    built = sections(tmp_path, chosen)
    figures = [figure for section in built.values() for block in section.blocks for figure in block.figures]
    assert len(figures) == 12
    for figure in figures:
        check_labels(figure)


def test_ticks_enclose_every_range() -> None:
    generator = random.Random(1)
    for _ in range(300):
        low = 10 ** generator.uniform(-4, 20)
        low, high = widened(low, low * 10 ** generator.choice([0, 0.01, 0.3, 1, 2, 5, 40, 280]) ** generator.random())
        ticks = log_ticks(low, high)
        assert ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= high * (1 - 1e-9)
        assert 3 <= len(ticks) <= 10 and ticks == sorted(set(ticks)), (low, high, ticks)
        texts = list(map(tick_text, ticks))
        assert len(set(texts)) == len(texts), texts


def test_ticks_of_known_ranges() -> None:
    assert log_ticks(17.0, 403.0) == [10, 20, 50, 100, 200, 500]
    assert log_ticks(19.0, 24.0) == [19, 20, 21, 22, 23, 24]
    assert [tick_text(tick) for tick in log_ticks(7.0, 3e8)][:3] == ["1", "10", "100"]
    assert tick_text(2e6) == r"$2\cdot10^{6}$" and tick_text(1e6) == "$10^{6}$"


def test_two_percent_are_a_tenth_of_an_axis(tmp_path: Path) -> None:
    results = {"a": perplexity("A", {512: 3.0, 1024: 3.0}), "b": perplexity("B", {512: 3.02, 1024: 3.02})}
    (axes,) = drawn(sections(tmp_path, results)["perplexity"].blocks[0].figures[0]).axes
    low, high = axes.get_ylim()
    assert 0.02 / math.log(high / low) < 0.1
    assert widened(2.0, 2.04)[1] / widened(2.0, 2.04)[0] == pytest.approx(LEAST_RATIO)
    assert widened(2.0, 3.0) == (2.0, 3.0)


def test_one_length_has_no_line(tmp_path: Path) -> None:
    results, _ = ablation(models=3, seeds=2, lengths=1)
    built = sections(tmp_path, results)
    assert not built["perplexity"].blocks[0].figures
    assert not built["passkey"].blocks[0].figures


# Numbers


def test_fewer_seeds_are_told(many: dict[str, Section]) -> None:
    for name in ("summary", "training", "perplexity", "passkey"):
        rows = {row.name: row for row in many[name].blocks[0].tables[0].rows}
        assert all("n = 2" in cell.detail for cell in rows["Method L"].cells if cell.value is not None and cell.seeds)
        assert any("n = 2" in cell.detail for cell in rows["Method L"].cells), name
        assert not any("n =" in cell.detail for cell in rows["Method A"].cells)


def test_interval_of_a_difference_as_published() -> None:
    """Newcombe 1998, Statistics in Medicine 17, Table II, contrast (a): 56/70 against 48/80 by method 10."""
    first, second = (
        Estimate(right / count, *wilson_interval(right / count, count), 1) for right, count in ((56, 70), (48, 80))
    )
    assert difference_interval(first, second) == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize(
    ("others", "bold"),
    [
        ([TableCell("", 2.0, low=1.9, high=2.1)], True),
        ([TableCell("", 1.1, low=1.0, high=1.2)], False),
        ([TableCell("", 2.0, low=1.9, high=2.1), TableCell("", 3.0, low=0.0, high=6.0)], False),
        ([TableCell("", 2.0)], False),
        ([TableCell("", 2.0, sample=(2.0,) * 6)], True),
        ([TableCell("", 2.0, sample=(2.0,) * 5)], False),
        ([TableCell("", 1.0, low=0.9, high=1.1)], False),
    ],
)
def test_bold_exceeds_its_uncertainty(others: list[TableCell], bold: bool) -> None:
    best = TableCell("", 1.0, low=0.9, high=1.1, sample=(1.0,) * len(others[0].sample))
    rows = mark_best([TableRow("", (cell,)) for cell in (best, *others)], lowest=True)
    assert [row.cells[0].best for row in rows] == [bold] + [False] * len(others)


@pytest.mark.parametrize(("documents", "baseline", "noted"), [(8, "A", True), (5, "A", False), (8, None, False)])
def test_the_note_on_markers_needs_something_to_mark(
    tmp_path: Path, documents: int, baseline: str | None, noted: bool
) -> None:
    def measured(label: str, nll: float) -> Result:
        cells = [window(size, nll, documents=documents) for size in (512, 1024)]
        return perplexity(label, {}, results=cells, documents=DOCUMENTS | {"count": documents})

    built = sections(tmp_path, {"a": measured("A", 3.0), "b": measured("B", 3.1)}, baseline=baseline)
    for name in ("summary", "perplexity"):
        assert any("†" in note for note in built[name].blocks[0].tables[0].notes) is noted


def test_a_single_label_is_not_marked(tmp_path: Path) -> None:
    cells = [window(512, 3.0, documents=8)]
    one = {"a": perplexity("A", {}, results=cells, documents=DOCUMENTS | {"count": 8})}
    table = sections(tmp_path, one, baseline="A")["perplexity"].blocks[0].tables[0]
    assert not any("†" in note for note in table.notes)


def provenance(blocks: tuple[ReportBlock, ...]) -> list[str]:
    return [line for block in blocks for line in block.provenance]


def test_paths_and_hashes_are_only_in_the_provenance(many: dict[str, Section]) -> None:
    for name in ("perplexity", "passkey"):
        blocks = many[name].blocks
        assert any("runs/3-s1" in line and "3-1-5ad1c0ff" in line for line in provenance(blocks))
        texts = [figure.caption for block in blocks for figure in block.figures]
        texts += [cell.text for block in blocks for table in block.tables for row in table.rows for cell in row.cells]
        assert not any("runs/" in text or "5ad1c0ff" in text for text in texts)


def test_the_provenance_has_the_overrides_of_evaluation(tmp_path: Path) -> None:
    built = sections(
        tmp_path, {"one": perplexity("A, extended", {512: 2.0}, overrides=NTK | {"logit_scaling": "log_n"})}
    )
    (line, *_) = provenance(built["perplexity"].blocks)
    assert line.endswith("A, extended (rope_scaling: rope_type dynamic, factor 4.0; logit_scaling: log_n)")


# Learning curves beside results


def find(files: list[Path]) -> dict[str, list[Any]]:
    found = find_curves(read_results(files))
    return {
        label: [tuple(point.model_dump().values()) for curve in curves for point in curve.points]
        for label, curves in found.items()
    }


def test_curves_beside_results(tmp_path: Path) -> None:
    results, curves = ablation(models=1, seeds=1)
    files = write(tmp_path, results)
    (tmp_path / "curve.json").write_text(curves["Method A"][0].model_dump_json())
    assert len(find(files)["Method A"]) == 200
    extended = perplexity("Method A", {512: 2.0}, overrides={"logit_scaling": "log_n"})
    assert not find(write(tmp_path, dict.fromkeys(results, extended)))


def test_analysis_and_needle_have_labels_to_the_ends(tmp_path: Path) -> None:
    built = sections(tmp_path, {"analysis": analysis("RoFormer"), "needle": needle("CoCA", [512])})
    for name in ("analysis", "needle"):
        for block in built[name].blocks:
            for figure in block.figures:
                check_labels(figure)
