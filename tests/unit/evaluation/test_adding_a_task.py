"""The guide of CONTRIBUTING.md, "An evaluation task", carried out: two files, a result, and what shows it."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_coca.commands.evaluate import main, parser
from megatron_coca.config import load_config
from megatron_coca.evaluation import tasks
from megatron_coca.evaluation.jobs import shares
from megatron_coca.evaluation.report import redrawn
from megatron_coca.evaluation.suite import option_arguments
from tests.checkpoint_files import write_checkpoint
from tests.documents import blocks

FILE = re.compile(r"# evaluation/tasks/(copying/\w+\.py)\n")


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The task of the guide: every block is the file that its first line names. No other file changes."""
    place = tmp_path / "tasks"
    (place / "copying").mkdir(parents=True)
    (place / "copying/__init__.py").touch()
    files = {found[1]: source for source in blocks("CONTRIBUTING.md", "python") if (found := FILE.match(source))}
    assert files.keys() == {"copying/task.py", "copying/measure.py"}
    for name, source in files.items():
        (place / name).write_text(source)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(place)])
    monkeypatch.setitem(tasks.TASKS, "copying", tasks.declared()["copying"])
    yield
    for module in [name for name in sys.modules if name.startswith(f"{tasks.__name__}.copying")]:
        del sys.modules[module]


@pytest.fixture
def results(tmp_path: Path, copying: None, capsys: pytest.CaptureFixture[str]) -> Path:
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 4}
    checkpoint = write_checkpoint(tmp_path / "run", load_config([], shape))
    given = ["copying", "--checkpoint", str(checkpoint), "--label", "small", "--device", "cpu"]
    given += ["--lengths", "8,1L", "--output", str(tmp_path / "results")]
    assert main(given) == 0 and "Copying accuracy by length" in capsys.readouterr().out
    before = (tmp_path / "results/copying_small.json").read_bytes()
    assert main(given) == 0 and (tmp_path / "results/copying_small.json").read_bytes() == before, "resumed"
    return tmp_path / "results"


def test_everything_that_shows_results_knows_the_task(results: Path, tmp_path: Path) -> None:
    entries = json.loads((results / "copying_small.json").read_text())["results"]
    values = {entry["length"]: entry["accuracy"] for entry in entries}
    assert values.keys() == {8, 16} and all(0 <= value <= 1 for value in values.values())
    report = tmp_path / "report"
    assert main(["report", str(results), "--output", str(report)]) == 0
    page = (report / "report.md").read_text()
    assert "## Copying" in page and re.search(rf"^\| small +\| +{values[8]:.2f} ", page, re.MULTILINE)
    assert f"small has a copying accuracy of {values[8]:.2f} at 8 tokens" in page.partition("\n## ")[0]
    with open(report / "results.csv", newline="") as file:
        found = {(row["task"], row["metric"], row["length"]): float(row["value"]) for row in csv.DictReader(file)}
    assert found == {("copying", "accuracy", str(length)): pytest.approx(value) for length, value in values.items()}
    assert f"{values[8]:.2f}" in (report / "tables/copying-1.tex").read_text()
    assert "figure(rows, 'copying', 'accuracy')" in json.dumps((report / "report.ipynb").read_text())
    assert redrawn.number_of("copying", "accuracy").quantity == "copying accuracy"
    assert (report / "figures/copying-1.svg").is_file()


def test_results_of_another_protocol_are_in_another_table(results: Path, tmp_path: Path) -> None:
    content = json.loads((results / "copying_small.json").read_text())
    content["protocol"]["text"] = "other tokens twice"
    (results / "copying_other.json").write_text(json.dumps(content))
    assert main(["report", str(results), "--output", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report/report.md").read_text()
    assert page.count("**Copying accuracy by length**") == 2 and "Results with protocol text='other tokens" in page


@pytest.mark.usefixtures("copying")
def test_suites_and_jobs_know_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert option_arguments("copying", {"lengths": "1L,2L"}, 16) == ["--lengths", "16,32"]
    args = parser().parse_args(["copying", "--checkpoint", "run", "--lengths", "8,16", "--output", "results"])
    assert [share.lengths for share in shares(args, 2)] == [[16], [8]]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "copies of random tokens, by length" in capsys.readouterr().out
