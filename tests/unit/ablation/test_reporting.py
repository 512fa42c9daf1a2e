"""Pages that are written from the results of an ablation, and the study's."""

from functools import partial
from pathlib import Path

import pytest

from megatron_coca.ablation import grid
from megatron_coca.ablation.cells import recorded_data, unpack
from megatron_coca.ablation.reporting import figures_of_scale, render, write_page
from megatron_coca.cli import main
from megatron_coca.evaluation.report.charts import Figure
from megatron_coca.evaluation.report.document import ReportBlock, ReportDocument, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.results import EvaluationError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def report() -> ReportDocument:
    """A report with one table and one plot."""
    rows = (
        TableRow("CoCA | a", (TableCell("17.31", 17.3142, detail="16.90–17.73", note="n = 2"),)),
        TableRow("RoFormer", (TableCell("18", 18.0),)),
        TableRow("CoCA | a", (TableCell("9", 9.0),), published="the paper"),
    )
    table = Table("summary", "", ("label", "64"), rows, ("stride 64",), ("the paper: of another model",))
    figure = Figure("report", "", "", lambda canvas, layout: None)
    return ReportDocument("", "", (Section("summary", "", (ReportBlock(figures=(figure,), tables=(table,)),)),))


def rendered(text: str, report: ReportDocument, folder: Path) -> tuple[str, dict[str, bytes]]:
    template = folder / "page.md.j2"
    template.write_text(text)
    return render(template, report, {"cells": [], "done": [object()]}, "study")


def test_tables_values_and_plots(report: ReportDocument, tmp_path: Path) -> None:
    number = "{{ '%.1f' | format(value('summary', 'CoCA | a', '64')) }}"
    text, plots = rendered(f"{{{{ table('summary') }}}}\n{number}\n{{{{ plot('report', 'Loss') }}}}", report, tmp_path)
    lines = text.splitlines()
    assert lines[2].split() == ["|", "CoCA", "\\|", "a", "|", "17.31", "(16.90–17.73)", "[1]", "|"]
    assert lines[3].split() == ["|", "RoFormer", "|", "18", "|"] and "9" not in lines[3]
    assert lines[4:] == ["", "[1] n = 2", "", "stride 64", "17.3", "![Loss](figures/study/report.svg)"]
    assert plots.keys() == {"report"} and b"<svg" in plots["report"]


def test_rows_are_chosen(report: ReportDocument, tmp_path: Path) -> None:
    text, _ = rendered("{{ table('summary', ['RoFormer']) }}", report, tmp_path)
    assert "RoFormer" in text and "CoCA" not in text and "n = 2" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ table('loss') }}", "page.md.j2: table loss: unknown; the report has summary"),
        ("{{ plot('loss', '') }}", "page.md.j2: plot loss: unknown; the report has report"),
        ("{{ value('summary', 'NoPE', '64') }}", "table summary: no number in row NoPE, column 64"),
        ("{{ value('summary', 'RoFormer', '128') }}", "table summary: no number in row RoFormer, column 128"),
        ("{{ tabel('summary') }}", "page.md.j2:1: UndefinedError: 'tabel' is undefined"),
        ("\n{{ table('summary', ['NoPE']) }}", "page.md.j2:2: KeyError: 'NoPE'"),
        ("{{ 1 / 0 }}", "page.md.j2:1: ZeroDivisionError"),
        ("{% if %}", "page.md.j2:1: TemplateSyntaxError: Expected an expression"),
    ],
)
def test_numbers_that_the_results_lack_are_errors(
    text: str, message: str, report: ReportDocument, tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match=message):
        rendered(text, report, tmp_path)


PAGES = [
    ("study/methods.yml", "1M", "study/page.md.j2", "study.md"),
    ("study/methods.yml", "250k", "study/page.md.j2", "study_250k.md"),
    ("recall/grid.yml", "answers", "recall/page.md.j2", "recall_study.md"),
    ("recall/grid.yml", "answers", "recall/findings.md.j2", "findings.md"),
    ("recall/grid.yml", "answers", "recall/details_page.md.j2", "recall_details.md"),
    ("recall/extensions.yml", "answers", "recall/extensions_page.md.j2", "recall_extensions.md"),
    ("recall/grid.yml", "text", "recall/text_page.md.j2", "recall_text.md"),
    ("recall/books_grid.yml", "250k", "recall/books_page.md.j2", "recall_books.md"),
    ("recall/polar_cube.yml", "answers", "recall/polar_page.md.j2", "recall_polar.md"),
    ("recall/unrotated.yml", "ordered", "recall/unrotated_page.md.j2", "recall_unrotated.md"),
    ("recall/books_polar_rates.yml", "250k", "recall/books_polar_page.md.j2", "recall_books_polar.md"),
    ("recall/books_power_rates.yml", "250k", "recall/power_page.md.j2", "recall_power.md"),
]
QUICK = ("study.md", "recall_text.md", "recall_power.md", "recall_polar.md")
"""Pages with few results; the others are read for 10 seconds each."""


@pytest.mark.parametrize(
    ("name", "scale", "template", "page"),
    [pytest.param(*page, id=page[-1], marks=[] if page[-1] in QUICK else pytest.mark.slow) for page in PAGES],
)
def test_a_page_of_a_study_follows_from_its_results(
    name: str, scale: str, template: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the archives are read, without the corpus: folders of results beside them may have newer cells."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    Path("benchmarks").mkdir()
    for archive in (ROOT / "benchmarks").glob("*.jsonl.zst"):
        Path("benchmarks", archive.name).symlink_to(archive)
    path, configs = Path("configs") / name, Path("configs")
    file = grid.read_ablation(path, scale)
    unpack(file.results)
    cells = grid.expand(file, recorded=recorded_data(file.results))
    write_page(file, cells, configs / template, tmp_path / page, partial(figures_of_scale, path))
    assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    drawn, shown = (
        sorted(each.name for each in root.glob(f"figures/{Path(page).stem}/*")) for root in (tmp_path, ROOT / "docs")
    )
    assert drawn == shown


def rows_of(page: str, header: str) -> dict[str, list[str]]:
    """The cells of the table with this column in its header, by the first cell of a row."""
    table = next(part for part in (ROOT / page).read_text().split("\n\n") if f" {header} " in part.partition("\n")[0])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    return {row[0]: row[1:] for row in [cells[0], *cells[2:]]}


def test_the_readme_shows_numbers_of_the_study() -> None:
    readme = rows_of("README.md", "recall at 16L")
    perplexity, recall = (rows_of("docs/recall_books.md", header) for header in ("truncated", "16L, beyond L only"))
    shown = (perplexity, "L"), (perplexity, "truncated"), (perplexity, "16L"), (recall, "L"), (recall, "16L")
    columns = [(table, table["model"].index(length)) for table, length in shown]
    assert {"RoFormer", "CoCA-Slack", "CoCA-Strict", "ALiBi, 8 heads", "KERPLE-log"} <= set(readme), "good and bad rows"
    for name, numbers in list(readme.items())[1:]:
        assert numbers == [table[name][column] for table, column in columns], name
    truncated, far = (perplexity["model"].index(name) for name in ("truncated", "16L"))
    best = float(perplexity["RoFormer"][truncated].split()[0])
    assert all(best < float(row[far].split()[0]) for name, row in perplexity.items() if name != "model")
    text, declared = (" ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/recall_books.md"))
    assert "no declared contrast of recall is significant after the correction for 14 contrasts (p = 0.1" in text
    assert "| CoCA-Slack, shifted against RoFormer | 16L | recall | 6 | 0.17 ± 0.11 | | 0.012 | 0.1 |" in declared
    later = " ".join((ROOT / "docs/recall_power.md").read_text().split())
    assert "CoCA-Slack's perplexity is 3.8% higher (3.2% to 4.4%" in text and "1.038 times (1.032 to 1.044)" in later
    assert "recalls 0.48 at 16L with NTK 4, and RoFormer 0.13 (p = 3e-05)" in text and "p = 3e-05, holds" in later


def test_a_report_without_results_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report needs no training data, so the message is not about the missing corpus."""
    line = ["ablate", str(ROOT / "configs/recall/books_power.yml"), "--report", "--output", str(tmp_path / "study")]
    assert main(line) == 2
    assert f"{tmp_path / 'study'}: no results yet" in capsys.readouterr().err
