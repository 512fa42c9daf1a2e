"""Launching processes for the tests of launching, with tiny scripts in place of training."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).parents[4]

LAUNCHER = """
import os, sys
from megatron_coca.config import LaunchConfig
from megatron_coca.training.launch import start
values = dict(pair.split("=") for pair in sys.argv[2:])
keys = {name: int(value) if value.isdigit() else value for name, value in values.items()}
config = LaunchConfig.model_validate({"num_gpus": 2} | keys)
status = start(config, os.environ, [sys.argv[1], "argument"])
sys.exit(99 if status is None else status)
"""
"""The launching process: the script is the first argument, keys follow."""

TRAINER = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(__file__).parent
def write(name):
    partial = folder / f"{rank}.{name}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(folder / f"{name}.{rank}")  # a reader sees the number or no file
def wait():
    write("ready")
    time.sleep(60)
"""

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture(name="launch")
def launcher(tmp_path: Path) -> Iterator[Launch]:
    """launch(body, *keys): the launching process of scripts with this body; processes left over are a failure."""
    started = []

    def run(body: str, *keys: str, **environment: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(TRAINER + textwrap.dedent(body))
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RANK", "WORLD", "LOCAL", "SLURM"))
        }
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(script), *keys],
            cwd=ROOT,
            env=clean | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
    left = [path.read_text() for path in tmp_path.glob("ready.*")]
    assert eventually(lambda: not any(alive(int(number)) for number in left)), "processes outlive their launcher"


def alive(number: int) -> bool:
    path = Path(f"/proc/{number}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + patience(seconds)
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def all_ready(folder: Path, count: int = 2) -> None:
    assert eventually(lambda: len(list(folder.glob("ready.*"))) == count)


def finish(process: subprocess.Popen[str], limit: float = 20.0) -> tuple[int, str, float]:
    began = time.monotonic()
    output, _ = process.communicate(timeout=patience(limit))
    return process.returncode, output, time.monotonic() - began


SAVING = """
def leave(number, frame):
    write("asked")
    time.sleep(0.2 + 0.4 * rank)
    write("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, leave)
wait()
"""
"""A process that takes its time to save when it is asked to stop."""
