"""Cells of a report that are not as they should be: interrupted, unnamed, not countable, impossible."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.cbook import is_math_text

from megatron_coca.evaluation import PerplexityResult
from megatron_coca.evaluation.report.document import ReportBlock
from megatron_coca.evaluation.report.plots.figures import PAGE, Figure, drawn, svg
from megatron_coca.evaluation.results import Result
from tests.unit.evaluation.report_cases import (
    DOCUMENTS,
    FULL,
    REROPE,
    analysis,
    lacking,
    needle,
    passkey,
    perplexity,
    ruler,
    sections_of,
    speed,
    window,
    write,
)


def only_section(folder: Path, name: str, results: Mapping[str, Result]) -> tuple[ReportBlock, ...]:
    """The blocks of one section of a report with our numbers only."""
    sections = sections_of(write(folder, dict(results)), papers=False)
    return next(section.blocks for section in sections if section.name == name)


def plotted(figure: Figure) -> dict[str, list[float]]:
    """Where along x the lines of a plot have points."""
    canvas = drawn(figure, PAGE)
    return {str(line.get_label()): [float(x) for x in np.asarray(line.get_xdata())] for line in canvas.axes[0].lines}


@pytest.mark.parametrize("label", ["_hidden", r"$\frac$", r"_a \$ from $5 to $6"])
def test_labels_are_no_markup_in_plots(tmp_path: Path, label: str) -> None:
    """Every plot can be drawn, and the label stands at its line as it is."""
    made: list[Result] = [
        perplexity("one", {512: 2.0, 1024: 2.5}),
        passkey("one", {512: 1.0, 1024: 0.5}),
        ruler("RoFormer", [512, 1024]),
        needle("RoFormer", [512, 1024]),
        analysis("RoFormer"),
    ]
    results = {str(at): each.model_copy(update={"label": label}) for at, each in enumerate(made)}
    result = speed()
    cells = [
        cell.model_copy(update={"method": label if cell.method == "coca" else cell.method}) for cell in result.results
    ]
    results["speed"] = result.model_copy(update={"results": cells})
    sections = sections_of(write(tmp_path, results), papers=True)
    figures = [figure for section in sections for block in section.blocks for figure in block.figures]
    assert len(figures) == 6
    named = 0
    for figure in figures:
        if label == r"$\frac$":
            assert svg(figure, "print"), "as a formula it could not be drawn"
        canvas = drawn(figure, PAGE)
        titles = [axes.get_title(loc="left") for axes in canvas.axes]
        shown = [text.get_text() for axes in canvas.axes for text in axes.texts]
        assert not any(map(is_math_text, [*titles, *shown]))
        named += any(" ".join(text.replace(r"\$", "$").split()) == label for text in shown)
    assert named == 5, "all but the heat map"


def interrupted_and_whole() -> dict[str, Result]:
    """Of three labels one has a window of which less is scored, with the lowest loss of all."""
    cells = {
        "partly": [window(512, 2.0, documents=8), window(1024, 1.0, documents=7)],
        "better": [window(512, 2.5, documents=8), window(1024, 2.6, documents=8)],
        "worse": [window(512, 2.5, documents=8), window(1024, 2.7, documents=8)],
    }
    documents, overrides = DOCUMENTS | {"count": 8}, {"partly": REROPE}
    return {
        label: perplexity(label, {}, results=own, documents=documents, overrides=overrides.get(label, {}))
        for label, own in cells.items()
    }


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupted_window_is_never_the_best(tmp_path: Path, number: int) -> None:
    table = only_section(tmp_path, "perplexity", interrupted_and_whole())[0].tables[number]
    assert [[cell.best for cell in row.cells] for row in table.rows] == [
        [True, False],
        [False, True],
        [False, False],
    ]
    assert table.rows[0].cells[1].note == "interrupted: the first 7 of 8 documents"


def test_a_best_needs_two_complete_numbers(tmp_path: Path) -> None:
    results = interrupted_and_whole()
    del results["worse"]
    table = only_section(tmp_path, "perplexity", results)[0].tables[0]
    assert not any(row.cells[1].best for row in table.rows)


def test_an_interrupted_window_is_not_plotted(tmp_path: Path) -> None:
    (figure,) = only_section(tmp_path, "perplexity", interrupted_and_whole())[0].figures
    lines = plotted(figure)
    assert lines["partly"] == [512] and lines["better"] == lines["worse"] == [512, 1024]
    alone = {"one": perplexity("one", {}, results=[window(512, 2.0, documents=3)])}
    assert not only_section(tmp_path / "alone", "perplexity", alone)[0].figures


def test_accuracy_of_the_next_token_by_window(tmp_path: Path) -> None:
    def measured(label: str, right: float, **changes: Any) -> PerplexityResult:
        longer = {"accuracy": right, "correct_by_document": [round(1023 * right)] * 8}
        cells = [window(512, 2.0, documents=8), window(1024, 2.0, documents=8) | longer]
        return perplexity(label, {}, results=cells, documents=DOCUMENTS | {"count": 8}, **changes)

    missing = [lacking("window 2048", "out of memory", FULL)]
    results = {"plain": measured("plain", 0.125), "rerope": measured("ReRoPE", 0.5, overrides=REROPE, missing=missing)}
    table = only_section(tmp_path, "perplexity", results)[0].tables[2]
    assert table.caption == "Next-token accuracy in percent by window"
    assert table.header == ("accuracy at window", "512*", "1024", "2048")
    texts = {row.name: [cell.text for cell in row.cells] for row in table.rows}
    assert texts == {"plain": ["25.00", "12.50", "not run"], "ReRoPE": ["25.00", "50.00", "OOM"]}
    assert [row.cells[1].best for row in table.rows] == [False, True], "the most is the best"


def test_missing_times_have_a_reason(tmp_path: Path) -> None:
    (block,) = only_section(tmp_path, "speed", {"speed": speed()})
    (row,) = [row for row in block.tables[0].rows if row.name == "dense"]
    assert [cell.note for cell in row.cells if cell.absent] == ["cpu ran out of memory"]
