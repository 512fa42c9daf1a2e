"""Child processes of the quickstart."""

import sys

import pytest

from megatron_coca.commands import quickstart
from megatron_coca.support.processes import exit_status


def test_a_killed_child_ends_the_quickstart(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Even beside children that succeed, and with the exit status that a shell shows."""
    program = "import os, sys; os.kill(os.getpid(), 9) if sys.argv[1] == 'dies' else sys.exit(int(sys.argv[1]))"
    monkeypatch.setattr(quickstart, "PROGRAM", (sys.executable, "-S", "-c", program))
    quickstart.run_together([["0"], ["0"]])
    with pytest.raises(SystemExit) as ended:
        quickstart.run_together([["dies"], ["0"]])
    assert ended.value.code == 137
    with pytest.raises(SystemExit) as ended:
        quickstart.run(["dies"])
    assert ended.value.code == 137
    assert (exit_status(0), exit_status(2), exit_status(-15)) == (0, 2, 143)
