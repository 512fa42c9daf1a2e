"""Signals at random and at chosen moments: the run exits with the documented status, and loses no steps."""

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from tests.integration.hooks import HOOKED, Hook
from tests.integration.killing import left_alive
from tests.patience import patience

TWO = ("--num_gpus", "2")
PAIR = {"train_batch_size": 8, "eval_iters": 0}


@pytest.mark.slow
def test_signals_at_random_moments(
    server: Any, live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """Twice in a row. A process that has not begun to listen ends by the signal; so may one that has finished."""
    generator, keys = random.Random(0), {"auto_resume": True, "save": str(tmp_path), "checkpoint_factor": 5}
    for number in (signal.SIGTERM, signal.SIGUSR1) * 3:
        life = server.start(keys)
        if life.wait(generator.uniform(0, 2)) is None:
            life.send(number)
            life.send(signal.SIGTERM)
        (status,) = life.end()
        assert status in (0, 75, -number, -signal.SIGTERM), life.output()
        assert "Traceback" not in life.output()
    live(keys)
    assert open_run(tmp_path).records == whole.records
    assert_same_state(open_run(tmp_path).state(12), whole.state(12))


def test_signals_at_chosen_moments(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    keys = {"auto_resume": True, "save": str(tmp_path), "checkpoint_factor": 2}
    for hook in (
        Hook("own files", "terminate twice"),
        Hook("commit", "ask to leave", [2]),
        Hook("evaluation", "terminate twice"),
    ):
        finished = live(keys, [hook], expected=75)
        assert f"step {native.steps(tmp_path)[-1]} is saved" in finished.output
        assert finished.output.count(": stopping after this step") == 1
    live(keys)
    assert open_run(tmp_path).records == whole.records, "the validation that was left out is made up for"
    assert_same_state(open_run(tmp_path).state(12), whole.state(12))


def test_a_signal_that_comes_late_in_a_validation_or_without_a_place_to_save(live: Any, tmp_path: Path) -> None:
    hook = Hook("evaluation", "terminate twice")
    unsaved = live({"log_dir": str(tmp_path)}, [hook], expected=78)
    assert "nothing is saved" in unsaved.output
    assert "validation" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("hook", [Hook("evaluation", "terminate twice", [2]), Hook("step", "ask to leave", [12])])
def test_a_validation_that_was_due_at_the_end_is_made_up_for_once(
    hook: Hook, live: Any, whole: Any, open_run: Any, tmp_path: Path
) -> None:
    keys = {"auto_resume": True, "save": str(tmp_path)}
    live(keys, [hook], expected=75)
    live(keys)
    assert open_run(tmp_path).records == whole.records
    assert "nothing to do" in live(keys).output and open_run(tmp_path).records == whole.records


@pytest.mark.slow
def test_a_kill_after_a_validation_does_not_report_it_twice(
    live: Any, whole: Any, open_run: Any, tmp_path: Path
) -> None:
    keys = {"auto_resume": True, "save": str(tmp_path)}
    live(keys, [Hook("evaluation", "terminate twice")], expected=75)
    live(keys, [Hook("step", "kill", [2])], expected=-9)
    live(keys)
    assert open_run(tmp_path).records == whole.records


@pytest.mark.fewest
@pytest.mark.parametrize(("point", "ranks"), [("backward", 1), ("evaluation", 1), ("own files", 1), ("step", 2)])
def test_ctrl_c_saves(point: str, ranks: int, live: Any, tmp_path: Path) -> None:
    """Also where one rank alone gets it."""
    keys = {"auto_resume": True, "save": str(tmp_path), "checkpoint_factor": 100, "train_batch_size": 8}
    live(keys | {"exit_interval": 2}, ranks=ranks)
    hooks = [Hook(point, "interrupt", ranks=[ranks - 1])]
    finished = live(keys | {"extra_save_iters": [4]}, hooks, ranks, expected=130)
    assert "Traceback" not in finished.output, finished.output
    last = native.steps(tmp_path)[-1]
    assert last > 2 and f"interrupted (SIGINT); step {last} is saved" in finished.output
    native.verify(native.locate(tmp_path))


def test_ctrl_c_before_there_is_anything_to_save(live: Any, tmp_path: Path) -> None:
    keys = {"auto_resume": True, "save": str(tmp_path), "checkpoint_factor": 2, "exit_interval": 2}
    live(keys)
    finished = live(keys | {"exit_interval": 6}, [Hook("restore", "interrupt")], expected=130)
    assert finished.output.splitlines()[-1].startswith("interrupted; --auto-resume resumes from")
    assert native.steps(tmp_path) == [2]


def test_a_second_ctrl_c_ends_at_once(live: Any, tmp_path: Path) -> None:
    keys = {"auto_resume": True, "save": str(tmp_path)}
    live(keys, [Hook("step", "interrupt", [3]), Hook("snapshot", "interrupt")], expected=-signal.SIGINT)
    assert not native.steps(tmp_path)


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Whoever starts the tests in the background lets them ignore it, and so would their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("point", ["own files", "commit", "backward"])
def test_ctrl_c_in_a_process_that_ends_as_python_does(point: str, train: Any, tmp_path: Path) -> None:
    hooks = json.dumps([Hook(point, "interrupt", [2])])
    keys = {"save": str(tmp_path), "checkpoint_factor": 2}
    finished = train(keys, before=HOOKED, environment={"HOOKS": hooks})
    assert finished.status == 130 and "Traceback" not in finished.output, finished.output


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize("options", [(), TWO], ids=["one process", "two"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
def test_a_signal_before_the_first_checkpoint_saves(
    number: int, status: int, options: tuple[str, ...], start: Any, tmp_path: Path
) -> None:
    process = _start_without_checkpoints(start, tmp_path, options)
    process.send_signal(number)
    output, _ = process.communicate(timeout=patience(120))
    assert process.returncode == status and "Traceback" not in output, output
    (last,) = native.steps(tmp_path)
    assert f"; step {last} is saved" in output
    native.verify(native.locate(tmp_path))
    assert not left_alive(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c_is_heard")
@pytest.mark.parametrize(("options", "status"), [((), -signal.SIGINT), (TWO, 130)], ids=["one process", "two"])
def test_a_second_ctrl_c_does_not_wait_for_the_save(
    options: tuple[str, ...], status: int, start: Any, tmp_path: Path
) -> None:
    hooks = json.dumps([Hook("snapshot", "wait")])  # the first save never ends
    process = _start_without_checkpoints(start, tmp_path, options, before=HOOKED, environment={"HOOKS": hooks})
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == status
    assert not native.steps(tmp_path) and not left_alive(tmp_path)


def _start_without_checkpoints(start: Any, save: Path, options: tuple[str, ...], **how: Any) -> Any:
    """A run that has trained 30 steps and saves none by itself."""
    keys = PAIR | {"save": str(save), "train_iters": 5000, "checkpoint_factor": 5000}
    process, metrics = start(keys, options=options, **how), save / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") >= 30):
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_a_save_folder_that_is_deleted_keeps_a_second_run_out(start: Any, tmp_path: Path) -> None:
    """The first run locks the folder again, and saves to it when it is asked to end."""
    run = tmp_path / "run"
    keys = {"save": str(run), "train_iters": 1_000_000, "log_interval": 1, "checkpoint_factor": None, "eval_iters": 0}
    with (tmp_path / "log").open("w") as log:
        first = start(keys, stdout=log)
    try:
        lines, deadline = run / "metrics.jsonl", time.monotonic() + 120
        for deleted in (False, True):
            while not (lines.is_file() and "loss" in lines.read_text()) and time.monotonic() < deadline:
                time.sleep(0.1)
            if not deleted:
                for _ in range(2):  # the run may have added a file meanwhile
                    shutil.rmtree(run, ignore_errors=True)
        second = start(keys)
        output, _ = second.communicate(timeout=120)
        assert second.returncode == 2 and "another run is saving to this folder" in output
        first.send_signal(signal.SIGXCPU)
        assert first.wait(120) == 75, (tmp_path / "log").read_text()
    finally:
        first.kill()
    assert len(native.steps(run)) == 1 and "run: deleted while this run was using it" in lines.read_text()
