"""The report of the first measurements on a GPU, with quick stand-ins for the measurements."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_coca.training.step_time import DEVICES
from tests.documents import ROOT
from tools import gpu_expected, gpu_report
from tools.gpu_report import PARTS, SENSES, main, read_speed, read_step, read_tests, read_tuner, rows

RESULTS = {
    "tests": "-c 'print(\"7 passed, 2 skipped in 1.00s\")'",
    "step": "-c 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])' FILE '"
    + json.dumps({"method": "coca", "tokens_per_second": 9.0, "ratio": 0.9, "ratio_to": "transformers", "mfu": 0.51})
    + "'",
    "neox": "-c 'raise SystemExit(\"no memory left\")'",
    "attention": "-c 'print(\"no file\")'",
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that take no time, on a device that PyTorch would call an A100."""
    monkeypatch.setattr(gpu_report, "gpu_name", lambda: DEVICES["A100-80"].name)
    parts = {name: PARTS[name]._replace(command=command) for name, command in RESULTS.items()}
    monkeypatch.setattr(gpu_report, "PARTS", parts)


@pytest.mark.usefixtures("stand_ins")
def test_parts_are_resumed_and_a_failed_one_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--output", str(tmp_path)]) == 1
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RESULTS}
    assert [record["status"] for record in records.values()] == ["done", "done", "failed", "failed"]
    assert records["neox"]["reason"] == "exit status 1" and records["neox"]["output"] == ["no memory left"]
    assert records["attention"]["reason"].startswith("its result cannot be read: FileNotFoundError")
    page = (tmp_path / "gpu_report.md").read_text()
    assert "| coca, MFU % | about | 50.33 | 51 | yes |" in page and "neox | failed: exit status 1" in page
    assert "| failed | exactly | 0 | 0 | yes | all tests pass |" in page and "no memory left" in page
    assert "| coca, ratio to transformers |  | - | 0.9 | - |  |" in page, "what was not expected is shown too"

    again = {name: PARTS[name]._replace(command="-c 'raise SystemExit(3)'") for name in RESULTS}
    again["neox"] = PARTS["neox"]._replace(command=RESULTS["step"])
    monkeypatch.setattr(gpu_report, "PARTS", again)
    assert main(["--output", str(tmp_path)]) == 1, "attention fails again"
    changed = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RESULTS}
    assert changed["tests"] == records["tests"] and changed["step"] == records["step"], "finished parts did not run"
    assert changed["neox"]["status"] == "done" and changed["attention"]["reason"] == "exit status 3"


def test_without_a_gpu_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "gpu_name", lambda: None)
    assert main(["--output", str(tmp_path / "none")]) == 2
    assert "nvidia-smi" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_dry_run_prints_commands_and_expectations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [line.partition(":")[0] for line in shown.splitlines() if line[0] != " "] == list(PARTS)
    assert "coca, MFU %: about A100-80" in shown and "tools/bench_train.py configs/350M" in shown


def test_expectations_are_those_of_the_estimate() -> None:
    """After a change of counts or assumptions: python tools/gpu_expected.py > benchmarks/gpu_expected.json"""
    expected = json.loads((ROOT / "benchmarks/gpu_expected.json").read_text())
    assert expected == gpu_expected.expectations() and expected.keys() == PARTS.keys()
    for part in expected.values():
        for row in part:
            assert row["sense"] in SENSES and row["values"].keys() <= {*DEVICES, "any"}


def test_figures_are_read_from_results(tmp_path: Path) -> None:
    file = tmp_path / "result"
    assert read_tests(file, "...\n1 failed, 7 passed, 2 errors in 3.1s\n") == {"passed": 7.0, "failed": 3.0}
    assert read_tests(file, "no tests ran in 0.1s") == {"passed": 0.0, "failed": 0.0}
    assert read_tuner(file, "# Launch(...): 1 ms\n(1, 128): Blocks(...),\n(2, 128): Blocks(...),\n") == {"rows": 2.0}
    line = {"method": "coca", "tokens_per_second": 5.0, "ratio": 1.5, "ratio_to": "rotary", "mfu": None}
    file.write_text(json.dumps(line) + "\n")
    assert read_step(file, "") == {"coca, tokens/s": 5.0, "coca, ratio to rotary": 1.5}
    cell = {"method": "coca", "length": 8, "seconds": 0.002, "peak_memory_bytes": 3e9}
    file.write_text(json.dumps({"results": [cell, cell | {"length": 9, "peak_memory_bytes": None}]}))
    assert read_speed(file, "") == {"coca, 8, ms": 2.0, "coca, 8, GB": 3.0, "coca, 9, ms": 2.0}


@pytest.mark.parametrize(
    ("sense", "measured", "verdict"),
    [
        ("about", 1.2, "yes"),
        ("about", 1.3, "NO"),
        ("at most", 1.3, "NO"),
        ("at least", 1.3, "yes"),
        ("exactly", 1, "yes"),
    ],
)
def test_verdicts(sense: str, measured: float, verdict: str) -> None:
    expected = {"step": [{"figure": "f", "sense": sense, "values": {"H100": 1.0}, "from": "x"}]}
    assert rows("step", "H100", {"f": measured}, expected)[0]["verdict"] == verdict
    assert rows("step", "other", {"f": measured}, expected)[0]["verdict"] == "-"
    assert rows("step", "H100", {}, expected)[0]["measured"] is None


def test_commands_are_those_of_this_project() -> None:
    """Every part's program exists."""
    for part in PARTS.values():
        program = part.command.split()[0]
        assert program == "-m" or (ROOT / program).is_file(), part.title


def test_help_needs_no_pytorch() -> None:
    text = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--help']; runpy.run_path('tools/{}.py')"
    for name in ("gpu_report", "gpu_expected"):
        code = text.format(name) + "['main']()"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "benchmarks/gpu_expected.json" in done.stdout
