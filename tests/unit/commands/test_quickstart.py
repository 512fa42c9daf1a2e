"""Child processes of the quickstart, and what it does on a slow machine."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_coca.commands import quickstart
from megatron_coca.commands.configs import shipped
from megatron_coca.config import load_config
from megatron_coca.work.statuses import exit_status
from tests.checkpoint_files import TINY, write_checkpoint

CHANGED = ("train_iters", "checkpoint_factor", "eval_interval")


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


@pytest.mark.parametrize(("training", "total"), [(50, 175), (86, 301), (150, 300), (240, 300), (400, 500)])
def test_a_slow_machine_does_less(training: float, total: float) -> None:
    """The whole takes five minutes, unless the training on recall alone takes most of them."""
    rest = quickstart.AFTER * training * quickstart.share_of_rest(training)
    assert training + rest == pytest.approx(total, abs=1)


@pytest.mark.parametrize("busy", [False, True])
def test_threads_do_not_spin_on_busy_cores(
    busy: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quickstart, "PROGRAM", (sys.executable, "-S", "-c", "pass"))
    monkeypatch.setattr(quickstart, "used_since", lambda began: (117.0, 1.33 if busy else 1.95))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("OMP_WAIT_POLICY", "x")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    file = str(Path(shipped("recall/model.yml")).resolve())
    monkeypatch.setattr(quickstart, "shipped", lambda name: file)
    monkeypatch.chdir(tmp_path)
    _, share = quickstart.recall([])
    assert os.environ.get("OMP_WAIT_POLICY") == ("passive" if busy else None)
    assert ("OMP_WAIT_POLICY=passive" in capsys.readouterr().out) == busy
    assert share == pytest.approx(183 / 117 / (4.5 if busy else 2.5))


def test_the_cores_that_children_used() -> None:
    began = os.times()
    subprocess.run([sys.executable, "-S", "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    seconds, cores = quickstart.used_since(began)
    assert 0.25 < seconds * cores < 1 and cores <= 1.1  # the system counts hundredths of seconds


def test_a_shortened_run_is_killed_midway_and_keeps_its_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[Sequence[str]] = []
    killed: list[int] = []
    file = str(Path(shipped("quickstart/roformer_coca.yml")).resolve())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "run", commands.append)
    monkeypatch.setattr(quickstart, "kill_after_step", lambda command, save, step: killed.append(step))
    monkeypatch.setattr(quickstart, "shipped", lambda name: file)
    for share in (1.0, 0.5, 0.0):
        quickstart.train("roformer_coca", [], share)
    assert killed == [150, 75, 15] and load_config([file]).schedule.train_iters == quickstart.STEPS
    given = [[part for part in command if part.split("=")[0] in CHANGED] for command in commands]
    half = ["train_iters=150", "checkpoint_factor=50", "eval_interval=75"]
    assert given == [[], half, ["train_iters=30", "checkpoint_factor=10", "eval_interval=15"]]
    write_checkpoint(tmp_path / "runs/quickstart/roformer_coca", load_config(TINY | {"train_iters": 150}), step=50)
    quickstart.train("roformer_coca", [], 1.0)
    assert [part for part in commands[-1] if part.split("=")[0] in CHANGED] == half and len(killed) == 3
