"""The report of the first measurements on a GPU, with quick stand-ins for the measurements."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents import ROOT
from tools import gpu_report
from tools.gpu_report import (
    PARTS,
    main,
    measure,
    read_speed,
    read_step,
    read_tests,
    read_tuner,
    reusable,
)

SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
WRITE = "-c 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])' FILE '{}'"
STEP = {"method": "coca", "tokens_per_second": 9.0, "ratio": 0.9, "ratio_to": "transformers", "mfu": 0.51}
RESULTS = {
    "tests": WRITE.format(SUITE.format(9, 0, 0, 2)),
    "step": WRITE.format(json.dumps(STEP)),
    "neox": "-c 'raise SystemExit(\"no memory left\")'",
    "attention": "-c 'print(\"no file\")'",
}
HERE = {
    "gpu": "NVIDIA A100-SXM4-80GB",
    "versions": {"torch": "2.13.0", "commit": "abc"},
    "nvidia-smi": [{"uuid": "GPU-1", "driver_version": "580.1", "power.limit": "400 W"}],
}


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that take no time, on a device that PyTorch would call an A100 of 79 GiB."""
    monkeypatch.setattr(gpu_report, "gpu", lambda: (HERE, 79.2))
    monkeypatch.setattr(gpu_report, "preflight", list)
    parts = {name: PARTS[name]._replace(command=command) for name, command in RESULTS.items()}
    monkeypatch.setattr(gpu_report, "PARTS", parts)


@pytest.mark.usefixtures("stand_ins")
def test_parts_are_resumed_and_a_failed_one_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path)]) == 1
    assert "4 of 4 parts to run, 55 minutes at most" in capsys.readouterr().err
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RESULTS}
    assert [record["status"] for record in records.values()] == ["done", "done", "failed", "failed"]
    assert all(record["machine"] == HERE for record in records.values())
    assert records["neox"]["reason"] == "exit status 1" and records["neox"]["output"] == ["no memory left"]
    assert records["attention"]["reason"].startswith("its result cannot be read: FileNotFoundError")
    page = (tmp_path / "gpu_report.md").read_text()
    assert "| coca, MFU % | 51 |" in page and "| passed | 7 |" in page
    assert "neox | failed: exit status 1" in page and "driver_version 580.1" in page and "commit abc" in page
    assert "| failed | 0 |" in page and "no memory left" in page
    assert "| coca, ratio to transformers | 0.9 |" in page

    again = {name: PARTS[name]._replace(command="-c 'raise SystemExit(3)'") for name in RESULTS}
    again["neox"] = PARTS["neox"]._replace(command=RESULTS["step"])
    monkeypatch.setattr(gpu_report, "PARTS", again)
    assert main(["--output", str(tmp_path)]) == 1, "attention fails again"
    changed = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RESULTS}
    assert changed["tests"] == records["tests"] and changed["step"] == records["step"], "finished parts did not run"
    assert changed["neox"]["status"] == "done" and changed["attention"]["reason"] == "exit status 3"


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100 80GB HBM3"},
        {"versions": {"torch": "2.13.0", "commit": "def"}},
        {"nvidia-smi": [{"uuid": "GPU-1", "driver_version": "590.1"}]},
        {"nvidia-smi": [{"uuid": "GPU-2", "driver_version": "580.1"}]},
    ],
)
def test_records_of_another_machine_or_code_are_not_reused(other: dict[str, Any]) -> None:
    record = {"status": "done", "machine": HERE}
    assert reusable(record, HERE | {"nvidia-smi": [HERE["nvidia-smi"][0] | {"power.limit": "350 W"}]})
    assert not reusable(record, HERE | other) and not reusable({"status": "done"}, HERE)
    assert not reusable(record | {"status": "skipped"}, HERE)


def test_a_part_ends_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    started = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    part = PARTS["step"]._replace(command=f'-c "print(1, flush=True); {started}"', minutes=0.03)
    before = time.monotonic()
    record = measure(part, tmp_path / "result", 79.2)
    assert time.monotonic() - before < 30
    assert record["status"] == "failed" and record["reason"] == "ended at its limit of 0.03 minutes"
    assert record["output"] == ["1"]


def test_a_part_that_does_not_fit_is_skipped(tmp_path: Path) -> None:
    record = measure(PARTS["step"], tmp_path / "result", 23.6)
    assert (record["status"], record["reason"]) == ("skipped", "needs 70 GiB, the GPU has 24")


@pytest.mark.parametrize(
    ("cuda", "available", "header", "compiler", "status", "said"),
    [
        (None, False, True, True, 0, "not a CUDA build"),
        ("13.0", False, True, True, 0, "its driver is older than CUDA 13.0 needs"),
        ("13.0", True, False, True, 0, "Python.h; install it"),
        ("13.0", True, True, False, 0, "install gcc, or set CC"),
        ("13.0", True, True, True, 1, "a Triton kernel does not run here"),
        ("13.0", True, True, True, 0, None),
    ],
)
def test_what_is_missing_is_said_first(
    cuda: str | None,
    available: bool,
    header: bool,
    compiler: bool,
    status: int,
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(gpu_report.sysconfig, "get_path", lambda name: str(tmp_path))
    if header:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(gpu_report.shutil, "which", lambda name: name if compiler else None)
    monkeypatch.setattr(gpu_report, "run_limited", lambda command, seconds: (status, "ptxas: error"))
    problems = gpu_report.preflight()
    assert problems == [] if said is None else len(problems) == 1 and said in problems[0]


def test_the_kernel_of_the_preflight_is_right() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    exec(gpu_report.KERNEL.replace('device="cuda"', 'device="cpu"'), {})


def test_without_a_gpu_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["--output", str(tmp_path / "none")]) == 2
    assert "nvidia-smi" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_dry_run_prints_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [line.partition(":")[0] for line in shown.splitlines() if line[0] != " "] == list(PARTS)
    assert "tools/bench_train.py configs/350M" in shown


def test_figures_are_read_from_results(tmp_path: Path) -> None:
    file = tmp_path / "result"
    file.write_text(SUITE.format(12, 1, 2, 2))
    assert read_tests(file, "") == {"passed": 7.0, "failed": 3.0, "skipped": 2.0}
    file.write_text(SUITE.format(5, 0, 0, 5))
    with pytest.raises(ValueError, match=r"no test passed \(0 failed, 5 skipped\)"):
        read_tests(file, "")
    assert read_tuner(file, "# Launch(...): 1 ms\n(1, 128): Blocks(...),\n(2, 128): Blocks(...),\n") == {"rows": 2.0}
    line = {"method": "coca", "tokens_per_second": 5.0, "ratio": 1.5, "ratio_to": "rotary", "mfu": None}
    file.write_text(json.dumps(line) + "\n")
    assert read_step(file, "") == {"coca, tokens/s": 5.0, "coca, ratio to rotary": 1.5}
    cell = {"method": "coca", "length": 8, "seconds": 0.002, "peak_memory_bytes": 3e9}
    file.write_text(json.dumps({"results": [cell, cell | {"length": 9, "peak_memory_bytes": None}]}))
    assert read_speed(file, "") == {"coca, 8, ms": 2.0, "coca, 8, GB": 3.0, "coca, 9, ms": 2.0}


def test_commands_are_those_of_this_project() -> None:
    """Every part's program exists."""
    for part in PARTS.values():
        program = part.command.split()[0]
        assert program == "-m" or (ROOT / program).is_file(), part.title


def test_help_needs_no_pytorch() -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--help']; "
    code += "runpy.run_path('tools/gpu_report.py')['main']()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
