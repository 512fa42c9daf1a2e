"""The report of the error that ends a process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_coca.work.error_report import ERROR_FILE, ErrorReport

ROOT = Path(__file__).parents[3]


def ended(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that reports its errors and then runs `body`."""
    code = f"from megatron_coca.work import error_report\nerror_report.install()\n{body}"
    variables = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)


def test_a_launching_process_gets_the_report_in_place_of_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    finished = ended("raise ValueError('wrong\\nat length')", **{ERROR_FILE: str(file)})
    assert finished.returncode == 1 and finished.stderr == ""
    report = ErrorReport.read(file)
    assert report is not None and report.summary == "ValueError: wrong" and report.traceback
    assert report.text.startswith("Traceback") and report.text.endswith("ValueError: wrong\nat length\n")


def test_torchrun_reads_the_report(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    finished = ended("raise ValueError('wrong')", **{ERROR_FILE: str(file), "TORCHELASTIC_RUN_ID": "none"})
    assert "ValueError: wrong" in finished.stderr, "torchrun shows little of it"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert failure.message["extraInfo"]["py_callstack"].endswith("ValueError: wrong\n") and failure.timestamp > 0


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"message": "torch's own"})])
def test_half_a_report_is_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(content)
    assert ErrorReport.read(tmp_path / "error.json") is None
