"""Pages that are written from the results of an ablation, and the study's."""

import re
from functools import partial
from pathlib import Path

import pytest

from megatron_coca.ablation import grid
from megatron_coca.ablation.cells import recorded_data, unpack
from megatron_coca.ablation.file import read_ablation
from megatron_coca.ablation.reporting import figures_of_scale, render, write_page
from megatron_coca.cli import main
from megatron_coca.evaluation.report.document import ReportBlock, ReportDocument, Section, Table, TableCell, TableRow
from megatron_coca.evaluation.report.plots.figures import Figure
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
        ("{{ table('loss') }}", "page.md.j2: table loss: unknown; .* has summary"),
        ("{{ plot('loss', '') }}", "page.md.j2: plot loss: unknown; .* has report"),
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


COMMAND = re.compile(r"<!-- Written by: megatron-coca ablate (\S+) (?:--scale (\S+) )?--page (\S+) (\S+) -->")
PAGES = [
    (plan, scale or None, template, page)
    for path in sorted((ROOT / "studies").rglob("*.md"))
    for plan, scale, template, page in COMMAND.findall(path.read_text())
]
"""Plan, scale, template and page of every command that a page names in its first lines."""
QUICK = ("methods/README.md", "random_filler/text.md", "books_power/README.md", "polar/README.md")
"""Pages with few results; the others are read for 10 seconds each."""


def copied(archives: Path) -> None:
    """Link what a page reads into the working folder, without unpacked results, which may have newer cells."""
    for path in archives.rglob("*"):
        if path.suffix in (".yml", ".j2", ".zst") or path.parent.name == "results":
            link = Path("studies") / path.relative_to(archives)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


@pytest.mark.parametrize(
    ("plan", "scale", "template", "page"),
    [
        pytest.param(*page, id=page[-1], marks=[] if page[-1].removeprefix("studies/") in QUICK else pytest.mark.slow)
        for page in PAGES
    ],
)
def test_a_page_of_a_study_follows_from_its_results(
    plan: str, scale: str | None, template: str, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the archives are read, without the corpus."""
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    copied(ROOT / "studies")
    path = Path(plan)
    file = read_ablation(path, scale)
    unpack(file.results)
    cells = grid.expand(file, recorded=recorded_data(file.results))
    written = Path("written", page)
    write_page(file, cells, Path(template), written, partial(figures_of_scale, path))
    assert written.read_text() == (ROOT / page).read_text()
    drawn, shown = (
        sorted(each.name for each in root.glob(f"figures/{written.stem}/*"))
        for root in (written.parent, (ROOT / page).parent)
    )
    assert drawn == shown


def test_every_template_has_a_page() -> None:
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "studies").rglob("*.md.j2")}
    assert {template for _, _, template, _ in PAGES} == templates and len(PAGES) > len(templates)


def rows_of(page: str, header: str) -> dict[str, list[str]]:
    """The cells of the table with this column in its header, by the first cell of a row."""
    table = next(part for part in (ROOT / page).read_text().split("\n\n") if f" {header} " in part.partition("\n")[0])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    return {row[0]: row[1:] for row in [cells[0], *cells[2:]]}


def by_order(model: str) -> dict[str, list[str]]:
    """The rows of a model's table of ordered recall, by extension. The first is the header."""
    part = (
        (ROOT / "studies/order_repairs/README.md").read_text().partition(f"\n| {model} | L |")[2].partition("\n\n")[0]
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in f"| | L |{part}".splitlines()]
    return {row[0]: row[1:] for row in [cells[0], *cells[2:]]}


def test_the_readme_shows_numbers_of_the_studies() -> None:
    """The table and the picture, the declared contrasts and the price, the correction, and the levels of guessing."""
    header = "facts in books, at 16L"
    readme, books = rows_of("README.md", header), rows_of("studies/books_power/README.md", "16L, beyond L only")
    columns = [books["model"].index(length) for length in ("L", "4L", "16L")]
    assert {"RoFormer", "RoFormer + ReRoPE, log n", "CoCA-Slack, shifted + NTK 4"} <= set(readme), "good and bad rows"
    for name, numbers in list(readme.items())[1:]:
        (model, _, extension), at = name.partition(" + "), by_order(name.partition(" + ")[0])
        assert at[""] == ["L", "2L", "4L", "8L", "16L"]
        ordered = at[extension or "none"]
        assert numbers == [books[name][columns[2]], ordered[0], ordered[4]], (name, model)
    dynamic, fixed = by_order("RoFormer")["dynamic YaRN"], by_order("RoFormer")["YaRN 16"]
    text, index, slack, contrasts, findings, order = (
        " ".join((ROOT / name).read_text().split())
        for name in (
            *("README.md", "docs/index.md", "studies/books_slack/README.md", "studies/contrasts.md"),
            *("studies/findings.md", "studies/order_repairs/README.md"),
        )
    )
    assert f"at 4L it recalls {fixed[2].split()[0]}" in text
    assert f"recalls {dynamic[2].split()[0]} at 4L and {dynamic[4].split()[0]} at 16L" in text
    assert dynamic[0] == by_order("RoFormer")["none"][0], "dynamic YaRN changes nothing up to L"
    assert "YaRN 16 is ahead by 0.42; p = 1.9e-12, declared" in text
    assert "16L: +0.42 (+0.40 to +0.43); p = 1.9e-12, holds" in order
    assert "CoCA-Slack + YaRN 16 against RoFormer + YaRN 16" in order and "p = 0.88, does not hold" in order
    rows = [books[f"RoFormer{added}"] for added in ("", "", " + YaRN 16", " + ReRoPE, log n")]
    at = [columns[0], columns[2], columns[2], columns[2]]
    within, beyond, yarn, rerope = (row[column].split()[0] for row, column in zip(rows, at, strict=True))
    for part in (f"from {within} to {beyond} at 16 times", f"YaRN 16 it stays at {yarn}, ", f"and log n at {rerope}"):
        assert part in text and part in index
    assert f"means over {rows[0][0]} seeds" in text and f"means over {rows[0][0]} seeds" in index
    plain = rows_of("studies/books_slack/README.md", "16L, beyond L only")
    ours, theirs = (plain[f"{name} + NTK 4"][columns[2]].split()[0] for name in ("CoCA-Slack", "RoFormer"))
    seeds = plain["RoFormer"][plain["model"].index("seeds")]
    assert f"recalls {ours} at 16L and RoFormer {theirs} ({seeds} seeds, p = 2.8e-06, [declared]" in text
    assert "p = 2.8e-06, holds" in slack and "0.047 (0.043 to 0.051) nats per byte above RoFormer's (4.8%" in slack
    assert "above RoFormer's by 0.047 nats, or 4.8%" in text
    assert "blind to order scores 0.29" in text and "and 0.29 in ordered recall" in findings
    corrected = re.search(r"\*\*(\d+) of (\d+) are significant", contrasts)
    assert corrected is not None
    assert f"Corrected together, {corrected[1]} of the {corrected[2]} declared contrasts [are significant]" in text


def test_a_report_without_results_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report needs no training data, so the message is not about the missing corpus."""
    line = ["ablate", str(ROOT / "studies/books_power/plan.yml"), "--report", "--output", str(tmp_path / "study")]
    assert main(line) == 2
    assert f"{tmp_path / 'study'}: no results yet" in capsys.readouterr().err
