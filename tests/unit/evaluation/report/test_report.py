"""The report: its files, its tables, and the results that it does not put into one table."""

import csv
import json
import logging
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.evaluation import EvaluationError, PerplexityResult, WindowResult, build_report
from megatron_coca.evaluation.report.curves import Curve, CurvePoint
from megatron_coca.evaluation.report.document import ReportDocument, console_text
from megatron_coca.evaluation.report.plots import figures
from megatron_coca.evaluation.report.reading import read_results
from megatron_coca.evaluation.report.sections import section_builders
from megatron_coca.evaluation.results import read_record, write_atomically
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.support.markdown_tables import escaped
from tests.unit.evaluation.report_cases import (
    DOCUMENTS,
    FULL,
    NTK,
    REFUSED,
    every_result,
    lacking,
    needle,
    perplexity,
    sections_of,
    speed,
    window,
    write,
    write_costs,
)


def test_tables_and_plots(tmp_path: Path) -> None:
    results = {
        "rotary": perplexity("rotary", {64: 2.0, 1024: 6.0}, length=64),
        "coca": perplexity("rotary coca", {64: 2.1, 256: 2.5, 1024: 3.0}, length=64),
    }
    files = write(tmp_path, results)
    folder = tmp_path / "new" / "folder"
    printed = build_report(files, folder, "Quick start")
    assert printed.splitlines()[:10] == [
        "Quick start",
        "",
        "At 1,024 tokens, 16 times the training length, rotary coca has the lowest perplexity, 20.09; the next label, "
        "rotary, has 403.43; this difference was not tested.",
        "",
        "Perplexity by window",
        "",
        "| perplexity at window |  64* |     256 |   1024 |",
        "| -------------------- | ---: | ------: | -----: |",
        "| rotary               | 7.39 | not run | 403.43 |",
        "| rotary coca          | 8.17 |   12.18 |  20.09 |",
    ]
    assert printed.splitlines()[-3:] == ["* training length (64)", "", "stride 512, 4 documents, 4092 tokens scored"]
    assert "RoFormer" not in printed, "the console shows only ours"
    rows = list(csv.reader((folder / "tables" / "perplexity-1.csv").read_text().splitlines()))
    assert [row[0] for row in rows[1:3]] == ["rotary", "rotary coca"]
    assert float(rows[2][4]) == pytest.approx(math.exp(3.0))
    assert (folder / "figures" / "perplexity-1.svg").read_bytes().startswith(b"<?xml")
    assert "](figures/perplexity-1.svg)" in (folder / "report.md").read_text()


def printed_of(*files: Path) -> str:
    """The text for the console, without any plot."""
    return console_text(ReportDocument("", "", sections_of(files, papers=False)))


def test_infinite_perplexity_survives_strict_json(tmp_path: Path) -> None:
    files = write(tmp_path, {"rotary": perplexity("rotary", {64: 2.0, 1024: 800.0})})

    def reject(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    stored = json.loads(files[0].read_text(), parse_constant=reject)
    assert stored["results"][1]["perplexity"] == "Infinity"
    assert read_record(files[0], PerplexityResult, "a result").results[1].perplexity == math.inf
    assert "|  inf |" in build_report(files, tmp_path, papers=False)


def test_windows_of_one_model_in_two_files_are_one_line(tmp_path: Path) -> None:
    results = {"a": perplexity("rotary", {1024: 6.0}), "b": perplexity("rotary", {64: 2.0})}
    assert "| rotary               | 7.39 | 403.43 |" in printed_of(*write(tmp_path, results))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"`rotary`: .*one.json .*two.json are different models"),
        ({"checkpoint__identity": "rotary"}, r"`rotary`: has the entry 64 of perplexity .*one.json"),
        ({"checkpoint__identity": "rotary", "overrides": NTK}, r"differ in overrides.rope_scaling"),
    ],
)
def test_a_label_stands_for_one_model(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    two = perplexity("two", {64: 2.0}, label="rotary", **changes)
    files = write(tmp_path, {"one": perplexity("rotary", {64: 2.0}), "two": two})
    with pytest.raises(EvaluationError, match=message):
        build_report(files, tmp_path / "report")
    assert not list((tmp_path / "report").glob("*"))


@pytest.mark.parametrize(
    ("changes", "heading"),
    [
        ({"documents__sha256": "bb"}, "Results with documents (sha256) bb"),
        ({"protocol__stride": 32}, "Results with stride 32"),
        ({"protocol__text": "otherwise"}, "Results with protocol otherwise"),
    ],
)
def test_results_of_other_settings_have_tables_of_their_own(
    tmp_path: Path, changes: dict[str, Any], heading: str
) -> None:
    one, two = perplexity("rotary", {64: 2.0}), perplexity("rotary", {64: 3.0}, **changes)
    printed = printed_of(*write(tmp_path, {"one": one, "two": two}))
    first, second = printed.split(heading)
    assert "7.39" in first and "20.09" not in first
    assert "20.09" in second and "7.39" not in second


def test_missing_cells_say_why(tmp_path: Path) -> None:
    missing = [lacking("window 2048", "out of memory", FULL), lacking("window 4096", "failed", "it broke")]
    refused = perplexity("ALiBi", {}, missing=[lacking("all", "refused", REFUSED)])
    results = {"one": perplexity("rotary", {1024: 3.0}, missing=missing), "two": refused}
    printed = printed_of(*write(tmp_path, results))
    lines = printed.splitlines()
    assert [cell.strip() for cell in lines[6].split("|")[1:-1]] == ["rotary", "20.09", "OOM [1]", "failed [2]"]
    assert [cell.strip() for cell in lines[7].split("|")[1:-1]] == ["ALiBi", *["not supported [3]"] * 3]
    assert {f"[1] {FULL}", "[2] it broke", f"[3] {REFUSED}"} <= set(lines)


def test_an_interrupted_window_has_no_number(tmp_path: Path) -> None:
    partly = perplexity("rotary", {}, results=[window(1024, 3.0, documents=3)])
    printed = printed_of(*write(tmp_path, {"one": partly}))
    assert "not run [1]" in printed and "[1] interrupted: the first 3 of 4 documents" in printed


def test_folders_are_searched_and_other_files_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    (file,) = write(tmp_path / "deep" / "er", {"one": perplexity("rotary", {64: 2.0})})
    write_costs(file, "rotary")
    (tmp_path / "foreign.json").write_text('{"task": "painting"}')
    (tmp_path / ".hidden.json").write_text("[]")
    (tmp_path / "cell.json").write_text("{}")
    found = read_results([tmp_path, file])
    assert [each.file for each in found] == [str(file)]
    assert caplog.text.count("foreign.json") == 1 and "hidden" not in caplog.text and "cell.json" not in caplog.text


@pytest.mark.parametrize("content", ["[]", "{}", '{"task": "painting"}', '{"task": ["passkey"]}'])
def test_a_foreign_file_that_is_named_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "foreign.json").write_text(content)
    with pytest.raises(EvaluationError, match=r"foreign.json: is not a result .* evaluate`"):
        build_report([tmp_path / "foreign.json"], tmp_path)


@pytest.mark.parametrize("task", TASKS)
def test_a_damaged_result_is_an_error_in_a_folder_too(tmp_path: Path, task: str) -> None:
    (tmp_path / "damaged.json").write_text(json.dumps({"task": task}))
    message = rf"damaged.json: is not a result .* evaluate {task}` .*; measure"
    with pytest.raises(EvaluationError, match=message):
        build_report([tmp_path], tmp_path / "report")


@pytest.mark.parametrize("accuracy", ["1e400", "NaN", "-0.1", "1.5"])
def test_an_accuracy_that_is_no_share_is_an_error(tmp_path: Path, accuracy: str) -> None:
    (file,) = write(tmp_path, {"one": perplexity("rotary", {64: 2.0})})
    text = file.read_text()
    changed = re.sub(r'"accuracy": ?[\d.e-]+', f'"accuracy": {accuracy}', text, count=1)
    assert changed != text
    file.write_text(changed)
    with pytest.raises(EvaluationError, match=r"is not a result of .*accuracy.*; measure it again"):
        read_results([file])


@pytest.mark.parametrize("content", [b"", b'{"task": "perplexity", "label": "ro', b"\x00", b"\xff\xfe", b"[" * 99_999])
@pytest.mark.parametrize("named", [False, True])
def test_a_file_that_is_not_json_is_an_error_in_a_folder_too(tmp_path: Path, content: bytes, named: bool) -> None:
    write(tmp_path, {"whole": perplexity("rotary", {64: 2.0})})
    (tmp_path / "damaged.json").write_bytes(content)
    with pytest.raises(EvaluationError, match=r"damaged.json: is damaged: not JSON .*; measure"):
        read_results([tmp_path / "damaged.json" if named else tmp_path])


def test_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"absent.json: cannot be read"):
        build_report([tmp_path / "absent.json"], tmp_path)
    for files in ([], [tmp_path], write(tmp_path, {"empty": perplexity("rotary", {})})):
        with pytest.raises(EvaluationError, match="results: "):
            build_report(files, tmp_path / "report")


def test_output_that_cannot_be_a_folder_is_an_error(tmp_path: Path) -> None:
    files = write(tmp_path, {"one": perplexity("rotary", {64: 2.0})})
    with pytest.raises(EvaluationError, match="cannot be written"):
        build_report(files, files[0])


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result.json"
    write_atomically(target, b"earlier")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(EvaluationError, match="result.json: cannot be written .No space left"):
        write_atomically(target, b"later")
    assert target.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [target]


def test_results_are_closed_records() -> None:
    with pytest.raises(ValueError, match="extra"):
        WindowResult.model_validate({**window(64, 1.0), "surprise": 1})


class Page(HTMLParser):
    """The elements of a page; `opened` has those that are not closed."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of everything, with a label that is no HTML."""
    folder = tmp_path_factory.mktemp("report")
    files = write(folder / "results", every_result())
    hostile = perplexity("<b>&\"'|label", {512: 3.0}, documents__sha256="cc33")
    write(folder / "results", {"hostile": hostile})
    assert files
    points = [CurvePoint(step=1, tokens=512, train_loss=3.0, validation_loss=None)]
    curves = {"RoFormer": [Curve(seed=1, points=points)]}
    drawing = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'
    kinds = [end for ends in figures.FILES.values() for end in ends.values()]
    with pytest.MonkeyPatch.context() as patch:  # the plots themselves take seconds, and are tested in plots/
        patch.setattr("megatron_coca.evaluation.report.build.images", lambda figure: dict.fromkeys(kinds, drawing))
        patch.setattr(figures, "png", lambda figure: drawing)
        build_report([folder / "results"], folder / "out", "<Everything>", papers=True, curves=curves)
    return folder / "out"


def test_the_page_is_well_formed_and_needs_nothing_else(report: Path) -> None:
    page = Page((report / "report.html").read_text())
    assert page.opened == []
    assert not {"script", "iframe", "object", "embed", "b"} & {tag for tag, _ in page.tags}
    places = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert places and all(str(place).startswith(("data:", "#")) for place in places)
    assert "url(" not in (report / "report.html").read_text() and "@import" not in (report / "report.html").read_text()
    targets = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = {str(each["href"])[1:] for each in page.all("a")}
    assert links and links <= targets
    identities = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    assert "<b>&\"'|label" in page.text


def test_labels_are_no_markup_in_markdown(report: Path) -> None:
    markdown = (report / "report.md").read_text()
    assert "# &lt;Everything&gt;\n" in markdown and "| &lt;b&gt;&amp;\"'\\|label" in markdown
    assert not re.search(r"<[a-zA-Z/!?]", markdown)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("RoFormer + CoCA, dynamic NTK 4", "RoFormer + CoCA, dynamic NTK 4"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("&lt;b", "&amp;lt;b"),
        ("[a](b) ![c](d)", r"\[a\](b) !\[c\](d)"),
        ("**a** _b_ `c` ~d~", r"\*\*a\*\* \_b\_ \`c\` \~d\~"),
        ("runs/350M_rotary _x a_", r"runs/350M_rotary \_x a\_"),
        ("a|b $x$ \\", r"a\|b \$x\$ \\"),
        ("a\x1b[2J\u202e", r"a\\x1b\[2J\\u202e"),
        ("one \r\n two\n# three", "one two # three"),
    ],
)
def test_plain_text_as_markdown(text: str, markdown: str) -> None:
    assert escaped(text) == markdown


def test_every_image_and_table_is_described(report: Path) -> None:
    page = Page((report / "report.html").read_text())
    images, tables = page.all("img"), page.all("table")
    assert (
        len(images) == len(page.all("figcaption")) == len(page.all("source")) == len(list(report.glob("figures/*.png")))
    )
    assert all(image["alt"] for image in images)
    assert len(tables) == len(page.all("caption")) == len(list(report.glob("tables/*.csv")))
    assert page.all("html")[0]["lang"] == "en" and any(each.get("name") == "viewport" for each in page.all("meta"))


def test_every_section_is_there(report: Path) -> None:
    page = Page((report / "report.html").read_text())
    assert [each["id"] for each in page.all("section")] == [each.name for each in section_builders()]
    assert TASKS.keys() == {task for each in section_builders() for task in each.tasks}
    markdown = (report / "report.md").read_text()
    assert all(f"## {each.title}\n" in markdown for each in section_builders())
    for word in ("Table 1", "Table 2", "Table 3", "Table 5", "Table 6", "next-token", "Wilson", "OOM", "failed"):
        assert word.lower() in page.text.lower()
    assert REFUSED in page.text and "cpu ran out of memory" in page.text


def test_captions_name_the_measurement(report: Path) -> None:
    text = Page((report / "report.html").read_text()).text
    for said in ("runs/350M_rotary, step 120000", "sha256 aa11bb22cc33", "bfloat16, sdpa, NVIDIA H200", "pg19/test"):
        assert said in text
    assert "the model reads W tokens and scores the last S" in text


def test_the_same_results_give_the_same_files(tmp_path: Path) -> None:
    results = {"one": perplexity("RoFormer", {512: 2.0}), "two": needle("CoCA", (512, 1024), (0, 100))}
    files = write(tmp_path, results)
    for name in ("a", "b"):
        build_report(files, tmp_path / name)
    written = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*")]
    assert {path.suffix for path in written} == {
        *(".html", ".md", ".csv", ".json", ".ipynb"),
        *(".svg", ".pdf", ".png", ".tex"),
    }
    for path in written:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes(), path


def test_without_papers_there_is_no_number_of_theirs(tmp_path: Path) -> None:
    write(tmp_path, every_result())
    sections = sections_of([tmp_path], papers=False)
    tables = [table for section in sections for block in section.blocks for table in block.tables]
    assert tables and not [row for table in tables for row in table.rows if row.published]
    with_papers = sections_of([tmp_path], papers=True)
    assert [
        row
        for section in with_papers
        for block in section.blocks
        for table in block.tables
        for row in table.rows
        if row.published
    ]


def test_the_best_of_ours_is_marked_and_theirs_never(tmp_path: Path) -> None:
    def measured(label: str, *nlls: float) -> PerplexityResult:
        cells = [window(size, nll, documents=8) for size, nll in zip((512, 1024), nlls, strict=True)]
        return perplexity(label, {}, results=cells, documents=DOCUMENTS | {"count": 8})

    results = {"one": measured("A", 2.0, 3.0), "two": measured("B", 2.5, 2.5)}
    (_, section, *_) = sections_of(write(tmp_path, results), papers=True)
    rows = section.blocks[0].tables[0].rows
    assert [[cell.best for cell in row.cells[:2]] for row in rows[:2]] == [[True, False], [False, True]]
    assert not any(cell.best for row in rows[2:] for cell in row.cells)


def test_a_report_needs_no_pytorch(tmp_path: Path) -> None:
    write(tmp_path / "results", {"one": perplexity("RoFormer", {512: 2.0, 1024: 2.5}), "two": speed()})
    given = ["report", str(tmp_path / "results"), "--output", str(tmp_path / "report")]
    program = (
        f"import sys; from megatron_coca.commands.evaluate import main; main({given}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert (tmp_path / "report/report.html").is_file()
