"""Plots and markers of a report of many series: styles, ticks, spans, labels, single lengths, and bold numbers."""

import math
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from megatron_coca.evaluation.report.charts import (
    LEAST_RATIO,
    Figure,
    Line,
    Panel,
    legend_columns,
    log_ticks,
    panels,
    tick_text,
    widened,
)
from megatron_coca.evaluation.report.curves import find_curves
from megatron_coca.evaluation.report.document import ReportBlock, Section, TableCell, TableRow
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


def drawn(figure: Figure) -> Canvas:
    canvas = Canvas(figsize=figure.size, layout="constrained")
    FigureCanvasAgg(canvas)
    figure.draw(canvas)
    canvas.draw_without_rendering()
    return canvas


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Section]:
    results, curves = ablation()
    return sections(tmp_path_factory.mktemp("many"), results, curves=curves, baseline="Method A")


def test_twelve_series_are_twelve_looks(many: dict[str, Section]) -> None:
    for name in ("training", "perplexity"):
        (axes,) = drawn(many[name].blocks[0].figures[0]).axes
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("training length")]
        looks = {(line.get_color(), str(line._dash_pattern)) for line in lines}  # type: ignore[attr-defined]
        assert len(lines) == len(looks) == 12
        assert len(axes.collections) == (0 if name == "training" else 12), "bars, not bands"


def test_few_points_have_markers_and_many_have_none(many: dict[str, Section]) -> None:
    training, validation = many["training"].blocks[0].figures
    for figure, marked in ((training, False), (validation, True)):
        (axes,) = drawn(figure).axes
        assert all((line.get_marker() != "None") is marked for line in axes.lines)
        assert "million" in axes.get_xlabel() and "nats per token" in axes.get_ylabel()


def overlapping(boxes: list[Any]) -> list[Any]:
    return [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def check_labels(figure: Figure) -> None:
    """Every axis is named, its labels reach its ends and do not overlap, and no text is cut off."""
    canvas = drawn(figure)
    width, height = canvas.bbox.width, canvas.bbox.height
    for axes in (each for each in canvas.axes if each.get_visible()):
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text() and label.get_visible()]
            low, high = sorted(axis.get_view_interval())
            shown = [label for label in labels if low <= label.get_unitless_position()[axis is axes.yaxis] <= high]
            rotated = any(label.get_rotation() for label in shown)
            boxes = [label.get_window_extent() for label in shown]
            assert rotated or not overlapping(boxes), (figure.name, [label.get_text() for label in shown])
            if axis.get_scale() == "log" and axis is axes.yaxis and shown:
                ends = [label.get_unitless_position()[1] for label in (shown[0], shown[-1])]
                assert math.log(min(ends) / low) < 0.1 * math.log(high / low), figure.name
                assert math.log(high / max(ends)) < 0.1 * math.log(high / low), figure.name
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        texts += [text for legend in canvas.legends for text in legend.get_texts()]
        for box in (text.get_window_extent() for text in texts if text.get_text()):
            assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, figure.name


def test_labels_of_an_ablation(many: dict[str, Section]) -> None:
    for figure in (figure for section in many.values() for block in section.blocks for figure in block.figures):
        check_labels(figure)


def test_labels_of_every_section(tmp_path: Path) -> None:
    chosen = {name: result for name, result in every_result().items() if name != "needle"}
    built = sections(tmp_path, chosen)
    figures = [figure for section in built.values() for block in section.blocks for figure in block.figures]
    assert len(figures) == 8
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


def test_legends_are_as_wide_as_their_plot() -> None:
    assert legend_columns(["a"] * 12, 9.0) == 4
    assert legend_columns(["a" * 30] * 12, 6.0) == 2
    assert legend_columns(["a" * 40, "b"], 9.0) == 2


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


def test_ten_labels_with_intervals_stay_apart() -> None:
    """Neighbours are a twentieth of an octave apart or so, and all lie nearer to their length than to the next."""
    lengths = (512.0, 1024.0)
    lines = tuple(Line(str(n), lengths, (1.0, 1.0), (0.9, 0.9), (1.1, 1.1)) for n in range(10))
    canvas = Canvas()
    panels([Panel(lines, "length", "loss")])(canvas)
    drawn = [line.get_xdata() for line in canvas.axes[0].get_lines()]
    octaves = np.log2(np.array(drawn)) - np.log2(lengths)
    assert np.diff(octaves[:, 0]).min() > 0.04 and np.abs(octaves).max() < 0.5
