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
from tools import gpu_report, records
from tools.gpu_report import PARTS, main, measure, reusable

HERE = {
    "gpu": "NVIDIA A100-SXM4-80GB",
    "versions": {"torch": "2.13.0", "commit": "abc"},
    "nvidia-smi": [{"uuid": "GPU-1", "driver_version": "580.1", "power.limit": "400 W"}],
}


def shown(text: str, status: int = 0) -> str:
    return f"-c 'print(\"{text}\"); raise SystemExit({status})'"


def test_parts_are_resumed_and_a_failed_one_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device that PyTorch would call an A100."""
    monkeypatch.setattr(records, "machine", lambda: HERE)
    monkeypatch.setattr(gpu_report, "unusable", lambda: None)
    commands = {"step": shown("no memory left", 1), "decode": shown("1.5 ms a token")}
    monkeypatch.setattr(
        gpu_report, "PARTS", {name: PARTS[name]._replace(command=text) for name, text in commands.items()}
    )
    assert main(["--output", str(tmp_path)]) == 1
    assert "step: failed with exit status 1 after" in capsys.readouterr().err
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in commands}
    assert [record["status"] for record in found.values()] == ["failed with exit status 1", "done"]
    assert all(record["machine"] == HERE for record in found.values())
    page = (tmp_path / "gpu_report.md").read_text()
    assert "| step | failed with exit status 1 |" in page and "no memory left" in page and "1.5 ms a token" in page
    assert "driver_version 580.1" in page and "commit abc" in page

    again = {name: PARTS[name]._replace(command=shown("9.0 tokens/s")) for name in commands}
    monkeypatch.setattr(gpu_report, "PARTS", again)
    assert main(["--output", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "decode.json").read_text()) == found["decode"], "a finished part did not run"
    assert "9.0 tokens/s" in (tmp_path / "gpu_report.md").read_text()


def test_records_of_another_gpu_or_code_are_not_reused() -> None:
    record = {"status": "done", "machine": HERE}
    assert reusable(record, HERE | {"nvidia-smi": []}) and not reusable({}, HERE)
    others: list[dict[str, Any]] = [{"gpu": "NVIDIA H100"}, {"versions": {"torch": "2.13.0", "commit": "def"}}]
    assert not any(reusable(record, HERE | other) for other in others)


def test_a_part_ends_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    started = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    part = PARTS["step"]._replace(command=f'-c "print(1, flush=True); {started}"', minutes=0.03)
    before = time.monotonic()
    record = measure(part, tmp_path / "result")
    assert time.monotonic() - before < 30
    assert record["status"] == "ended at its limit of 0.03 minutes" and record["output"] == ["1"]


def test_what_is_missing_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["--output", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "nvidia-smi" in said and "too old for CUDA 13.0" in said and not (tmp_path / "none").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "run_limited", lambda command, seconds: (1, "ptxas: error"))
    assert "python3-dev" in (gpu_report.unusable() or "")


def test_the_kernel_of_the_first_check_is_right() -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    exec(gpu_report.KERNEL.replace('device="cuda"', 'device="cpu"'), {})


def test_a_dry_run_prints_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every part's program exists."""
    assert main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == list(PARTS)
    programs = [line.split()[1] for line in lines if line[0] == " "]
    assert all(program == "-m" or (ROOT / program).is_file() for program in programs)


def test_help_needs_no_pytorch() -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['x', '--help']; "
    code += "runpy.run_path('tools/gpu_report.py')['main']()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--dry-run" in done.stdout
