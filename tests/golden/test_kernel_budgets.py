"""Compile every Triton kernel for NVIDIA GPUs, and check that it stays within benchmarks/kernels/budgets.json."""

import os
import subprocess
import sys

import pytest

from tests.documents import ROOT

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_stay_within_their_budget(capability: int) -> None:
    """No spills, asynchronous copies, tensor cores; no more registers, shared memory or instructions than recorded.

    Record anew with: PYTHONPATH=. .venv/bin/python tests/golden/kernel_budgets.py --write
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, ROOT / "tests/golden/kernel_budgets.py", str(capability)],
        check=False,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("sm_") > 50, finished.stdout
