"""A command and its child processes end together."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_coca.work.processes import run_together
from megatron_coca.work.signals import PREEMPTION


def runs(process: int) -> bool:
    """Whether a process exists and has not ended; one that nobody has waited for still has an entry."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [*PREEMPTION, signal.SIGKILL])
def test_a_command_that_is_stopped_stops_its_children(number: signal.Signals, tmp_path: Path) -> None:
    child = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    files = [tmp_path / "one", tmp_path / "two"]
    commands = [[sys.executable, "-S", "-c", child, str(file)] for file in files]
    parent = multiprocessing.get_context("fork").Process(target=run_together, args=(commands,))
    parent.start()
    assert parent.pid is not None
    while not all(file.is_file() and file.read_text() for file in files):
        assert parent.is_alive()
        time.sleep(0.05)
    os.kill(parent.pid, number)
    parent.join(30)
    assert parent.exitcode not in (None, 0)
    deadline = time.monotonic() + 30
    while any(runs(int(file.read_text())) for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_statuses_of_processes_are_those_of_a_shell() -> None:
    code = "import os, sys; os.kill(os.getpid(), 9) if sys.argv[1] == 'dies' else sys.exit(int(sys.argv[1]))"
    commands = [[sys.executable, "-S", "-c", code, text] for text in ("0", "2", "dies")]
    assert run_together(commands) == [0, 2, 137]
