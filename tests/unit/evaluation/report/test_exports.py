"""The numbers of a report for papers: results.csv, results.json, LaTeX and the notebook."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from megatron_coca.evaluation import EvaluationError, build_report
from megatron_coca.evaluation.report import notebook, redrawn
from megatron_coca.evaluation.report.document import Table, TableCell, TableRow
from megatron_coca.evaluation.report.latex import latex, latex_table
from megatron_coca.evaluation.report.notebook import CODE, TEXT, executed
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.sections import tidy
from megatron_coca.evaluation.report.tidy import csv_text, read_rows
from tests.unit.evaluation.report_cases import (
    ablation,
    analysis,
    every_result,
    longppl,
    perplexity,
    recall,
    sections_of,
    speed,
    write,
)

COLUMNS = ["label", "weights", "variant", "seed", "task", "metric", "length", "value", "low", "high"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three models with three seeds, and of one label with recall."""
    folder = tmp_path_factory.mktemp("exports")
    results, _ = ablation(models=3, lengths=3)
    results["recall"] = recall("RoFormer", {512: 1.0, 1024: 0.5})
    write(folder / "results", results)
    build_report([folder / "results"], folder / "report", "A <study>")
    return folder / "report"


def test_results_csv_is_tidy(report: Path) -> None:
    frame = pd.read_csv(report / "results.csv")
    assert list(frame.columns[:10]) == COLUMNS
    assert not frame.duplicated(["label", "seed", "task", "metric", "length"]).any()
    found = frame[(frame.label == "Method A") & (frame.metric == "perplexity") & (frame.length == 512)]
    assert sorted(found.seed) == [0, 1, 2] and found.value.between(20, 40).all()
    beyond = frame[frame.metric == "accuracy, beyond"]
    assert (beyond.low <= beyond.value).all() and (beyond.value <= beyond.high).all() and len(beyond) > 5


def test_labels_are_text_for_every_reader(tmp_path: Path) -> None:
    """Our reader keeps each label, and so does pandas with the types that docs/report.md names."""
    labels = ["NA", "None", "null", "007", "1e5", "=1+2", "it's"]
    results = {str(number): perplexity(label, {512: 2.0}) for number, label in enumerate(labels)}
    build_report(write(tmp_path / "results", results), tmp_path / "report")
    path = tmp_path / "report/results.csv"
    ours = redrawn.read_frame(path)
    assert set(ours.label) == set(ours.weights) == set(labels) and set(ours.variant) == {""}
    assert ours.length.tolist() == [512] * len(ours) and ours.low.isna().all() and ours.value.dtype == float
    page = (Path(__file__).parents[4] / "docs/report.md").read_text()
    call = page[page.index("import pandas\n") :].partition("```")[0]
    names: dict[str, Any] = {}
    exec(call.replace("results/report/results.csv", str(path)), names)
    assert set(names["results"].label) == {label.replace("=", "'=") for label in labels}
    assert names["results"].value.tolist() == ours.value.tolist() and names["results"].low.isna().all()
    assert '"007"' in path.read_text() and '"007"' in (tmp_path / "report/tables/headline.csv").read_text()


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    results = every_result() | {"formula": perplexity('=1+2, "quoted"', {512: 2.0})}
    rows = tidy(read_results(write(tmp_path, results)))
    (tmp_path / "results.csv").write_text(csv_text(rows))
    again = read_rows(tmp_path / "results.csv")
    assert [row.label for row in again] == [row.label for row in rows] and len(rows) > 100
    assert {row.task.partition(" (")[0] for row in rows} >= {
        "passkey",
        "needle",
        "ruler",
        "recall",
        "lm-eval",
        "analyse",
        "speed",
    }
    assert sum(task.startswith("perplexity (documents") for task in {row.task for row in rows}) == 2, "two corpora"
    assert all(mine.value == pytest.approx(other.value, rel=1e-9) for mine, other in zip(rows, again, strict=True))


def test_labels_leave_terminals_and_readers_alone(tmp_path: Path) -> None:
    label = "a\x1b]0;x\x07\u202eb"
    build_report(write(tmp_path / "results", {"1": perplexity(label, {512: 2.0})}), tmp_path / "report")
    for file in ("report.md", "results.csv", "tables/headline.csv", "tables/headline.tex"):
        text = (tmp_path / "report" / file).read_text()
        assert not {"\x1b", "\x07", "\u202e"} & set(text), file
    assert r"a\x1b]0;x\x07\u202eb" in (tmp_path / "report/results.csv").read_text()
    long = write(tmp_path / "long", {"1": perplexity("a" * 10_001, {512: 2.0})})
    with pytest.raises(EvaluationError, match="label: 10,001 characters, more than 10,000; measure it again"):
        build_report(long, tmp_path / "report")


def test_the_csv_gives_the_numbers_of_the_page(tmp_path: Path) -> None:
    """Means and intervals over seeds from results.csv are those of the page's tables."""
    results, _ = ablation(models=3, lengths=3)
    for label, growth in (("RoFormer", 1.5), ("CoCA", 0.2)):
        for seed in range(3):
            of_seed = longppl(label, {8192: 2.5 + 0.01 * seed, 16384: 2.5 + growth + 0.3 * growth * seed})
            checkpoint = of_seed.checkpoint.model_copy(update={"identity": f"{label}-{seed}", "seed": seed})
            results[f"longppl_{label}_{seed}"] = of_seed.model_copy(update={"checkpoint": checkpoint})
    files = write(tmp_path, results)
    rows = tidy(read_results(files))
    for name, metric in (("perplexity", "perplexity"), ("passkey", "accuracy"), ("longppl", "LongPPL")):
        page = next(section for section in sections_of(files) if section.name == name).blocks[0].tables[0]
        table = redrawn.table(rows, name, metric)
        ours = [row for row in page.rows if not row.published]
        shown = {row.name: [(cell.text, cell.best) for cell in row.cells] for row in ours}
        assert {row.name: [(cell.text, cell.best) for cell in row.cells] for row in table.rows} == shown
        ends = [[cell.low for cell in row.cells] for row in ours if name != "passkey"]
        assert not ends or [[cell.low for cell in row.cells] for row in table.rows] == [pytest.approx(x) for x in ends]


def test_times_of_different_models_are_not_averaged(tmp_path: Path) -> None:
    small = speed()
    slow = [entry.model_copy(update={"seconds": 7 * entry.seconds}) for entry in small.results]
    files = write(tmp_path, {"a": small, "b": small.model_copy(update={"label": "1B", "results": slow})})
    rows = tidy(read_results(files))
    tasks = list(dict.fromkeys(row.task for row in rows))
    assert tasks == ["speed (1: 350M on NVIDIA H200)", "speed (2: 1B on NVIDIA H200)"]
    one, other = (redrawn.table(rows, task, "decode, seconds").rows[0].cells[0] for task in tasks)
    assert one.value is not None and other.value == pytest.approx(7 * one.value) and one.seeds == 1 and not one.detail


def test_a_measure_of_attention_has_no_best_label(tmp_path: Path) -> None:
    """As on the page: a share of anomalous pairs is not better if it is larger."""
    found = []
    for label, share in (("RoFormer", 0.1), ("CoCA", 0.9)):
        for seed in range(3):
            of_seed = analysis(label)
            entries = [
                entry.model_copy(
                    update={
                        "angles": entry.angles and entry.angles.model_copy(update={"anomalous": share + 0.01 * seed})
                    }
                )
                for entry in of_seed.results
            ]
            checkpoint = of_seed.checkpoint.model_copy(update={"identity": f"{label}-{seed}", "seed": seed})
            found.append(of_seed.model_copy(update={"checkpoint": checkpoint, "results": entries}))
    rows = tidy(read_results(write(tmp_path, {str(at): each for at, each in enumerate(found)})))
    table = redrawn.table(rows, "analyse", "anomalous pairs")
    assert table.rows[1].cells[0].low is not None and not any(cell.best for row in table.rows for cell in row.cells)


@pytest.mark.parametrize("kind", ["tables", "figures"])
def test_a_report_is_not_written_through_a_link(kind: str, tmp_path: Path) -> None:
    """The folder of a report may come from somebody else, with a link and the names of files to remove."""
    private, folder = tmp_path / "private", tmp_path / "report"
    private.mkdir()
    for name in ("mine.csv", "perplexity-1.csv", "mine.svg"):
        (private / name).write_text("mine")
    results = write(tmp_path / "results", {"a": perplexity("A", {512: 2.0})})
    build_report(results, folder)
    content = json.loads((folder / "results.json").read_text())
    content["tables"].append({"name": "mine"})
    content["figures"].append({"name": "mine"})
    (folder / "results.json").write_text(json.dumps(content))
    shutil.rmtree(folder / kind, ignore_errors=True)
    (folder / kind).symlink_to(private)
    with pytest.raises(EvaluationError, match=f"{folder / kind}: a link to {private}, .*remove the link"):
        build_report(results, folder)
    assert sorted(path.read_text() for path in private.iterdir()) == ["mine"] * 3


def test_a_new_report_removes_the_numbers_of_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill there is no page, because its tables can be those of either report."""
    one, other = write(
        tmp_path / "results", {"a": perplexity("A", {512: 2.0, 1024: 3.0}), "b": recall("B", {512: 1.0})}
    )
    build_report([one, other], tmp_path)
    earlier = tmp_path / "tables" / "recall-1.tex"
    (tmp_path / "tables" / "mine.tex").write_text("not of the report")
    assert earlier.is_file() and (tmp_path / "report.html").is_file()
    with monkeypatch.context() as killed:
        killed.setattr("megatron_coca.evaluation.report.build._notebook", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_report([one], tmp_path)
    assert not (tmp_path / "report.html").exists() and not earlier.exists()
    build_report([one], tmp_path)
    kept = {path.name for path in (tmp_path / "tables").iterdir()}
    assert "mine.tex" in kept and not [name for name in kept if name.startswith("recall")]
    assert (tmp_path / "report.html").is_file()


def test_an_unknown_metric_is_an_error(tmp_path: Path) -> None:
    rows = tidy(read_results(write(tmp_path, {"one": perplexity("A", {512: 2.0})})))
    with pytest.raises(EvaluationError, match="recall accuracy: has no numbers .* perplexity per"):
        redrawn.table(rows, "recall", "accuracy")


def test_results_json_has_the_claim_and_every_cell(tmp_path: Path) -> None:
    files = write(tmp_path / "results", {"one": perplexity("A", {512: 2.0, 1024: 800.0})})
    build_report(files, tmp_path)
    content = json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["claim"]["sentence"] in (tmp_path / "report.md").read_text()
    (table,) = [table for table in content["tables"] if table["name"] == "perplexity-1"]
    assert [cell["value"] for cell in table["rows"][0]["cells"]] == [pytest.approx(math.exp(2.0)), "Infinity"]
    assert any("runs/350M" in line for line in content["provenance"])
    assert {number["metric"] for number in content["numbers"]} == {"perplexity", "loss", "next-token accuracy"}


def test_latex_marks_what_the_page_marks() -> None:
    ours = (TableCell("1.23†", 1.23, "1.00–1.50", best=True), TableCell("OOM", note="a < b", absent=True))
    theirs = (TableCell("2.0"), TableCell(""))
    rows = (TableRow("a_b & c", ours), TableRow("[x]", theirs, published="paper, Table 1"))
    table = Table("name", "50% of #1", ("label", "512*", "512*"), rows, ("* trained",), ("source",))
    text, wide = (
        latex_table(table),
        TableRow("a label of more than sixty characters is for both columns of a page", ours),
    )
    for line in (
        r"\caption{50\% of \#1}",
        r"\label{tab:name}",
        r"\begin{tabular}{lrr}",
        r"label & 512\textsuperscript{*} & 512\textsuperscript{*} \\",
        r"a\_b \& c & \textbf{1.23\textsuperscript{\dag}} {\scriptsize 1.00--1.50} & OOM\textsuperscript{1} \\",
        r"\multicolumn{3}{l}{\emph{paper, Table 1}} \\",
        r"\emph{{[}x]} & 2.0 &  \\",
        r"\par\smallskip{\footnotesize \textsuperscript{1} a \textless{} b\par}",
    ):
        assert line in text.splitlines(), line
    assert r"\end{table}" in text and r"\end{table*}" in latex_table(replace(table, caption="", rows=(wide,)))
    assert text.count(r"\midrule") == 2 and text.index(r"\toprule") < text.index(r"\bottomrule")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (r"a\b", r"a\textbackslash{}b"),
        ("{~^}", r"\{\textasciitilde{}\textasciicircum{}\}"),
        ("Nd²", r"Nd\textsuperscript{2}"),
        ("−2 Ä Ω", r"$-$2 Ä $\Omega$"),
        ("旋转 a_b 😀", r"\nonlatin{旋转}{U+65CB U+8F6C} a\_b \nonlatin{😀}{U+1F600}"),
        ("a\x1b[2J\u202e", r"a\textbackslash{}x1b{[}2J\textbackslash{}u202e"),
        ('"θ ≥ 2"', r"{\char34}$\theta$ $\geq$ 2{\char34}"),
    ],
)
def test_plain_text_as_latex(text: str, escaped: str) -> None:
    assert latex(text) == escaped


def test_the_notebook_has_its_outputs(report: Path) -> None:
    """Running its cells again gives the same outputs; it needs only results.csv."""
    content = json.loads((report / notebook.NAME).read_text())
    assert content["nbformat"] == 4 and len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    code = [cell for cell in content["cells"] if cell["cell_type"] == CODE]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [next(iter(output.get("data", output))) for cell in code for output in cell["outputs"]]
    assert kinds.count("image/png") == kinds.count("text/html") == 3 and "name" in kinds, "and LaTeX as text"
    assert "# A &lt;study&gt;\n" in "".join(content["cells"][0]["source"]), "a label is never read as HTML"
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]]
    folder = report.parent / "again"
    folder.mkdir()
    (folder / "results.csv").write_bytes((report / "results.csv").read_bytes())
    assert executed(cells, folder) == (report / notebook.NAME).read_text()


def test_cells_print_and_show_their_last_value(tmp_path: Path) -> None:
    cells = [(TEXT, "# text"), (CODE, "x = 2\nprint(x)"), (CODE, "x + 1")]
    outputs = [cell.get("outputs") for cell in json.loads(executed(cells, tmp_path))["cells"]]
    assert outputs[0] is None and outputs[1][0]["text"] == ["2\n"]
    shown: dict[str, Any] = outputs[2][0]
    assert shown["data"] == {"text/plain": ["3"]} and shown["execution_count"] == 2
