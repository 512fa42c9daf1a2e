"""A run outlives its output: a closed terminal, a full disk behind the log, a reader that has ended."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from megatron_coca.training.launches import read_launches
from tests.conftest import clean_environment, command_line
from tests.terminal import hang_up

ROOT = Path(__file__).parents[3]


def step_of(folder: Path) -> Callable[[], bool]:
    """A function that returns whether the run in `folder` has reported three steps."""
    metrics = folder / "metrics.jsonl"
    return lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, id="one process"), pytest.param(2, id="two processes", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["closed", "disowned"])
def test_a_closed_terminal(small: dict[str, Any], ranks: int, ignored: bool, tmp_path: Path) -> None:
    """The run saves and ends as after any signal, and goes on to its end if it ignores the signal."""
    steps = 40 if ignored else 1_000_000
    keys = small | {"save": str(tmp_path / "run"), "train_iters": steps, "num_gpus": ranks, "train_batch_size": 8}
    keys |= {"log_interval": 1, "checkpoint_factor": None, "eval_iters": 0}
    command = [sys.executable, str(ROOT / "train.py"), *command_line(keys)]
    status = hang_up(command, step_of(tmp_path / "run"), clean_environment(), ignored)
    (saved,) = native.steps(tmp_path / "run")
    end = read_launches(tmp_path / "run")[-1]
    assert (status, end["status"]) == ((0, 0) if ignored else (75, 75)), end
    assert saved == steps if ignored else saved >= 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if "event" in line]
    if ignored:
        assert sum("standard error: cannot be written (Input/output error)" in event for event in events) == 1, events


@pytest.mark.parametrize("output", ["no reader", pytest.param("full disk", marks=pytest.mark.slow)])
def test_a_log_that_takes_no_more(start: Any, whole: Any, open_run: Any, output: str, tmp_path: Path) -> None:
    """As with `train ... 2>&1 | head` and with a log on a full disk: training ends with its last step, and says so.

    The weights are those of a run that was forked from a process with all imports (fork_server.py).
    """
    if output == "no reader":
        reader, descriptor = os.pipe()
        os.close(reader)
    else:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    process = start({"save": str(tmp_path / "run")}, stdout=descriptor)
    os.close(descriptor)
    assert process.wait(300) == 0 and native.steps(tmp_path / "run") == [12]
    assert open_run(tmp_path / "run").weights(12) == whole.weights(12)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    reason = {"no reader": "Broken pipe", "full disk": "No space left on device"}[output]
    said = [line["event"] for line in lines if "event" in line]
    assert said == [f"standard error: cannot be written ({reason}); the work continues, and this text is lost"]
