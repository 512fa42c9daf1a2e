"""The first measurements on a GPU, with a stand-in for Python that records its arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT

PARTS = ("tests", "step", "graphs", "neox", "attention", "decode", "tuner", "memory")
STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exit ${NO_GPU:-0}
echo "$@"
case "$*" in *"${FAILS:-nothing}"*) exit 3;; esac
"""


def report(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    command = ["sh", "tools/gpu_report.sh", str(folder / "gpu")]
    environment = os.environ | {"PYTHON": str(python)} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_parts_are_resumed_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    first = report(tmp_path, FAILS="cuda_graphs")
    assert first.returncode == 1 and first.stderr == f"graphs: failed, see {tmp_path}/gpu/graphs.log\n"
    done = {path.stem for path in (tmp_path / "gpu").glob("*.done")}
    assert done == {*PARTS} - {"graphs"}
    again = report(tmp_path)
    assert again.returncode == 0 and again.stdout == "graphs: 15 minutes at most\n"
    assert report(tmp_path).stdout == ""


def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = report(tmp_path, NO_GPU="1")
    assert done.returncode == 2 and "nvidia-smi" in done.stderr and not list((tmp_path / "gpu").glob("*.done"))


@pytest.mark.parametrize("name", PARTS)
def test_commands_are_those_of_this_project(name: str, tmp_path: Path) -> None:
    """Every part's program and configuration files exist."""
    report(tmp_path)
    words = (tmp_path / "gpu" / f"{name}.log").read_text().split()
    assert words[0] == "-m" or (ROOT / words[0]).is_file()
    assert all((ROOT / word).is_file() for word in words if word.startswith("configs/"))
