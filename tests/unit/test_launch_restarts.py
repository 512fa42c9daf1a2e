"""Restarts by the launching process: after which ends, how often, and what ends the waiting for one."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_cases import SAVING, Launch, all_ready, finish, launcher  # noqa: F401

from megatron_coca.checkpoints import native
from megatron_coca.config import ConfigError, LaunchConfig
from megatron_coca.training.exit_status import EXIT_STATUSES
from megatron_coca.training.launch import start
from megatron_coca.training.launch.processes import FINAL, LONGEST_DELAY, run_with_restarts

CRASHES = """
starts = folder / f"starts.{rank}"
starts.open("a").write(f"{' '.join(sys.argv[1:])}\\n")
number = len(starts.read_text().splitlines())
def crash_until(last, status=1):
    sys.exit(status if number <= last and rank == 1 else 0)
"""
"""Every start of a process adds its arguments as a line to a file."""


def starts(folder: Path) -> list[str]:
    return (folder / "starts.1").read_text().splitlines()


def restarting(launch: Launch, folder: Path, body: str, restarts: int, delay: str = "0") -> tuple[int, str, float]:
    keys = (f"max_restarts={restarts}", f"restart_delay={delay}", f"save={folder}/run")
    return finish(launch(CRASHES + body, *keys))


def test_a_run_that_crashes_is_started_again_and_resumes(launch: Launch, tmp_path: Path) -> None:
    status, output, _ = restarting(launch, tmp_path, "crash_until(2)", 3)
    assert status == 0, output
    assert starts(tmp_path) == ["argument", "argument --auto-resume", "argument --auto-resume"]
    told = [line for line in output.splitlines() if line.startswith("restart")]
    why = "the run ended with exit status 1; it resumes from step 0, because no checkpoint was saved yet"
    assert told == [f"restart 1 of 3 in 0 s: {why}", f"restart 2 of 3 in 0 s: {why}"]


@pytest.mark.parametrize(("status", "body"), [(1, "crash_until(9)"), (137, "os.kill(os.getpid(), 9)")])
def test_the_last_status_is_that_of_the_crash(launch: Launch, tmp_path: Path, status: int, body: str) -> None:
    found, output, _ = restarting(launch, tmp_path, body, 1)
    assert found == status and len(starts(tmp_path)) == 2, output
    assert "no restart: 1 of 1 are used without a new checkpoint (max_restarts)" in output


@pytest.mark.parametrize("status", [2, 75, 77, 78])
def test_ends_that_a_restart_would_not_change(launch: Launch, tmp_path: Path, status: int) -> None:
    found, output, _ = restarting(launch, tmp_path, f"crash_until(9, {status})", 2)
    assert found == status and len(starts(tmp_path)) == 1 and "restart" not in output


def test_every_status_is_decided() -> None:
    assert set(EXIT_STATUSES) - FINAL == {1, 69, 76, 79}


def test_a_single_process_is_restarted_too(launch: Launch, tmp_path: Path) -> None:
    body = (
        "open(folder / 'all', 'a').write('x')\nos.kill(os.getpid(), 9) if len(open(folder / 'all').read()) == 1 else 0"
    )
    status, output, _ = finish(launch(body, "num_gpus=1", "max_restarts=1", "restart_delay=0", f"save={tmp_path}/run"))
    assert status == 0 and "restart 1 of 1 in 0 s: the run was ended by SIGKILL" in output, output


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_wait_for_a_restart(launch: Launch, tmp_path: Path, number: int, status: int) -> None:
    keys = ("max_restarts=3", "restart_delay=60", f"save={tmp_path}/run")
    process = launch(CRASHES + "write('over')\ncrash_until(9)", *keys)
    assert process.stdout is not None
    assert any(line.startswith("restart 1 of 3 in 60 s") for line in iter(process.stdout.readline, ""))
    process.send_signal(number)
    assert process.wait(5) == status and len(starts(tmp_path)) == 1


def test_what_fails_after_a_request_to_stop_is_not_restarted(launch: Launch, tmp_path: Path) -> None:
    keys = ("max_restarts=3", "restart_delay=0", f"save={tmp_path}/run")
    process = launch(SAVING.replace("sys.exit(75)", "sys.exit(1)"), *keys)
    all_ready(tmp_path)
    process.send_signal(signal.SIGTERM)
    status, output, _ = finish(process)
    assert status == 1 and "restart" not in output, output


def test_restarts_need_checkpoints_to_resume_from() -> None:
    with pytest.raises(ConfigError, match="max_restarts: a restart resumes from a checkpoint, and none is saved"):
        start(LaunchConfig.model_validate({"max_restarts": 1}), {}, ["train.py"])


def test_one_host_of_several_is_not_restarted_by_itself(launch: Launch, tmp_path: Path) -> None:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "master-0"}
    process = launch(CRASHES + "crash_until(9)", "max_restarts=2", f"save={tmp_path}/run", **pod)
    status, output, _ = finish(process)
    assert status == 1 and len(starts(tmp_path)) == 1 and "max_restarts: not used" in output, output


class Quiet:
    """No signals come."""

    requested = None

    def take(self) -> list[int]:
        return []


def outcome(folder: Path, limit: int, runs: list[Callable[[], int]], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The delays before the restarts of a run whose starts are `runs`."""
    waited: list[float] = []
    monkeypatch.setattr("megatron_coca.training.launch.processes._wait", lambda delay, _: waited.append(delay))
    starts = iter(runs)
    keys = LaunchConfig.model_validate({"max_restarts": limit, "restart_delay": 5.0})
    latest = lambda: max(native.steps(folder), default=0)  # noqa: E731
    run_with_restarts(keys, latest, lambda _: next(starts)(), Quiet())
    return waited


def reaching(folder: Path, step: int) -> Callable[[], int]:
    """A start that writes the checkpoint of `step` and then crashes."""

    def run() -> int:
        native.step_folder(folder, step).mkdir(parents=True)
        (native.step_folder(folder, step) / native.MANIFEST).write_text("{}")
        return 1

    return run


def test_delays_double_and_a_new_checkpoint_sets_the_count_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = lambda: 1  # noqa: E731
    assert outcome(tmp_path / "a", 3, [crash] * 4, monkeypatch) == [5.0, 10.0, 20.0]
    assert outcome(tmp_path / "b", 9, [crash] * 10, monkeypatch)[-2:] == [LONGEST_DELAY] * 2
    runs = [crash, crash, reaching(tmp_path / "c", 10), crash, crash]
    assert outcome(tmp_path / "c", 2, runs, monkeypatch) == [5.0, 10.0, 5.0, 10.0]
    assert "restart 1 of 2 in 5 s: the run ended with exit status 1; it resumes from step 10" in capsys.readouterr().err
