"""Tasks and the local engine, with a stand-in for the program."""

import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_coca.work import engines, tasks
from megatron_coca.work.engines import run
from megatron_coca.work.settings import ClusterError, EngineSettings
from megatron_coca.work.statuses import EXIT_STATUSES, FAILED, FINAL, TEMPORARY, Failure, is_temporary, status_of
from megatron_coca.work.tasks import CommandTask, TaskFailed

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
command, part = sys.argv[1], sys.argv[-1].replace("/", "of")
starts = Path(f"{part}.starts")
starts.write_text((starts.read_text() if starts.exists() else "") + "x")
print("output of", part)
if command == "dies" and part == "2of3" and len(starts.read_text()) < 3:
    os.kill(os.getpid(), signal.SIGKILL)
if command == "lost":
    os.kill(os.getpid(), signal.SIGKILL)
if command == "wrong" and part == "2of3":
    sys.exit(2)
if command == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    Path("ready").touch()
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(tasks, "PROGRAM", (sys.executable, "-S", str(tmp_path / "program.py")))


def starts(folder: Path) -> dict[str, int]:
    return {path.stem: len(path.read_text()) for path in folder.glob("*.starts")}


@pytest.mark.parametrize(
    ("command", "expected"),
    [("dies", {"1of3": 1, "2of3": 3, "3of3": 1, "end": 1}), ("wrong", {"1of3": 1, "2of3": 1, "3of3": 1, "end": 1})],
)
def test_every_part_runs_and_then_the_end(
    command: str, expected: dict[str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A killed command is started again; one that exits with a final status is not, and the others still run."""
    step = CommandTask((command,), tmp_path, 3, (0, 1, 2))
    finish = CommandTask(("finish", "end"), tmp_path)
    assert run(EngineSettings(engine="local", workers=2), step, finish, tmp_path / "logs") == 0
    assert starts(tmp_path) == expected
    shown = capfd.readouterr()
    assert "output of end" in shown.out and ("part 2 of 3 failed" in shown.err) == (command == "wrong")
    (log,) = tmp_path.glob("logs/*/output/part_2.txt")
    assert log.read_text().endswith("output of 2of3\n")
    assert run(EngineSettings(engine="local"), replace(step, numbers=(1,)), None, tmp_path / "logs") == (
        2 if command == "wrong" else 0
    )


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([], 0), ([2], 2), ([77, 2, 130], 2), ([-9], 1), ([2, 137], 1), ([1], 2), ([75], 1), ([-2], 2), ([69, 1], 1)],
)
def test_a_command_s_status_says_whether_to_repeat_it(statuses: list[int], expected: int) -> None:
    """One child that was killed, or that could not continue for the moment, is enough."""
    assert status_of([Failure("x", is_temporary(status)) for status in statuses]) == expected


def test_every_exit_status_is_final_temporary_or_a_failure() -> None:
    assert sorted((*FINAL, *TEMPORARY, FAILED)) == sorted(EXIT_STATUSES)


def test_a_second_step_runs_after_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even if a task of the first step failed. Its output has a folder of its own."""
    step, second = CommandTask(("wrong",), tmp_path, 3, (0, 1, 2)), CommandTask(("again",), tmp_path, 2, (0, 1))
    finish = CommandTask(("finish", "end"), tmp_path)
    assert run(EngineSettings(engine="local"), step, finish, tmp_path / "logs", second) == 0
    assert starts(tmp_path) == {"1of3": 1, "2of3": 1, "3of3": 1, "1of2": 1, "2of2": 1, "end": 1}
    assert "3 tasks, then 2 tasks on the engine local" in capfd.readouterr().err
    (log,) = tmp_path.glob("logs/*/second/output/part_2.txt")
    ended = max((tmp_path / f"{number}of3.starts").stat().st_mtime_ns for number in (1, 2, 3))
    assert log.read_text() == "output of 2of2\n" and (tmp_path / "1of2.starts").stat().st_mtime_ns >= ended


def test_a_scheduler_s_signal_lets_the_command_save(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(TaskFailed) as failed:
        CommandTask(("waits",), tmp_path, 1, (0,))(None, 0, 1)
    other.join()
    assert failed.value.status == 75 and starts(tmp_path) == {"1of1": 1}


def test_a_signal_to_the_local_engine_lets_all_commands_save(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its tasks run in threads, which get no signals. No other task is started, nor the end."""

    def interrupt() -> None:
        while len(starts(tmp_path)) < 2 or not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    other = threading.Thread(target=interrupt)
    other.start()
    step, finish = CommandTask(("waits",), tmp_path, 3, (0, 1, 2)), CommandTask(("finish", "end"), tmp_path)
    begin = time.monotonic()
    assert run(EngineSettings(engine="local", workers=2), step, finish, tmp_path / "logs") == 75
    other.join()
    assert starts(tmp_path) == {"1of3": 1, "2of3": 1} and time.monotonic() - begin < 30
    assert "stopped by a signal; run the same command again" in capfd.readouterr().err


def test_without_an_end_the_tasks_decide_the_status(tmp_path: Path) -> None:
    step = CommandTask(("lost",), tmp_path, 2, (0, 1))
    assert run(EngineSettings(engine="local"), step, None, tmp_path / "logs") == 1
    assert starts(tmp_path) == {"1of2": 3, "2of2": 3}


class _Lost(Exception):
    pass


def test_a_last_task_that_ray_loses_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for Ray that runs a task when its result is read, and loses the last one."""

    def get(task: tuple[CommandTask, ...]) -> int:
        if len(task) == 1:
            raise _Lost("the worker died")
        return tasks.status_of_task(*task)

    ray = ModuleType("ray")
    for name, value in {
        "init": lambda *_, **__: None,
        "shutdown": lambda: None,
        "remote": lambda **_: lambda _function: SimpleNamespace(remote=lambda *task: task),
        "wait": lambda running: (running[:1], running[1:]),
        "get": get,
        "exceptions": SimpleNamespace(RayError=_Lost),
    }.items():
        setattr(ray, name, value)
    monkeypatch.setitem(sys.modules, "ray", ray)
    step, finish = CommandTask(("step",), tmp_path, 2, (0, 1)), CommandTask(("finish", "end"), tmp_path)
    assert run(EngineSettings(engine="ray"), step, finish, tmp_path / "logs") == FAILED
    assert starts(tmp_path) == {"1of2": 1, "2of2": 1}
    assert "the last task failed: the worker died" in capfd.readouterr().err


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> int:
        raise ImportError("No module named 'datatrove'", name="datatrove")

    monkeypatch.setitem(engines.ENGINES, "slurm", absent)
    step = CommandTask(("x",), tmp_path, 1, (0,))
    with pytest.raises(ClusterError, match=r"datatrove: not installed; pip install 'megatron-coca\[cluster\]'"):
        run(EngineSettings(engine="slurm"), step, None, tmp_path / "logs")
