"""`megatron-coca status`: the state of runs, from their folders only."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.cli import main
from megatron_coca.training.launches import GAVE_UP, REQUEUED, LaunchRecord, append
from megatron_coca.work.statuses import Preempted


def made(folder: Path, step: int = 20, eta: float | None = 5000.0) -> Path:
    """A run that was preempted once, resumed, and has reached `step` of 100, with a checkpoint of step 10."""
    for start, error in ((0, Preempted("SIGTERM")), (10, None)):
        record = LaunchRecord(folder, True)
        record.start(start, 100, ["n0"], str(folder))
        if error is not None:
            record.__exit__(type(error), error, None)
    (folder / "global_step10").mkdir()
    (folder / "global_step10" / "manifest.json").write_text("{}")
    (folder / "global_step15").mkdir()  # incomplete
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 1.0, "eta_seconds": eta},
        {"step": step, "validation_loss": 2},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    (folder / ".lock").touch()
    return folder


def table(capsys: pytest.CaptureFixture[str], *folders: Path) -> list[list[str]]:
    assert main(["status", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_run_that_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "report.html").touch()
    with (run / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (cells, reason) = table(capsys, *sorted(tmp_path.iterdir()))
    name, state, step, eta, checkpoint, restarts = cells
    assert (name, state, step, restarts) == (str(run), "running", "20 of 100", "1")
    assert eta.startswith(("1:2", "1:1")), "5000 s, less the age of the line"
    assert checkpoint.startswith("step 10, 0:0")
    assert reason == [f"{run}: 1 x status 75, preempted"]


@pytest.mark.parametrize(
    ("last", "state"),
    [
        (None, "killed"),
        ({"event": "end", "status": 0, "why": "status 0, finished"}, "finished"),
        (
            {"event": "end", "status": 77, "why": "status 77, too many bad steps"},
            "ended: status 77, too many bad steps",
        ),
        ({"event": REQUEUED, "why": "status 137, SIGKILL (n1: Killed)"}, "requeued: status 137, SIGKILL (n1: Killed)"),
        ({"event": GAVE_UP, "why": "status 1, an error"}, "gave up: status 1, an error"),
    ],
)
def test_a_run_that_does_not_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: dict[str, Any] | None, state: str
) -> None:
    run = made(tmp_path / "run")
    if last is not None:
        append(run, last)
    (cells, _) = table(capsys, run)
    assert cells[1:4] == [state, "20 of 100", "-"]


def test_a_long_reason_does_not_widen_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, why = made(tmp_path / "run"), f"status 1, an error: {'long ' * 30}end"
    append(run, {"event": "end", "status": 1, "why": why})
    cells, *lines = table(capsys, run)
    assert len(cells[1]) == 60 and cells[1].startswith("ended: status 1, an error: long") and cells[1].endswith("...")
    assert lines[-1] == [f"{run}: ended: {why}"]


def test_a_run_that_was_killed_after_its_last_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    (run / "global_step15").rename(run / "global_step100")
    (run / "global_step100" / "manifest.json").write_text("{}")
    assert table(capsys, run)[0][1] == "finished"


def test_a_run_from_before_launches_were_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    (run / "launches.jsonl").unlink()
    (cells,) = table(capsys, run)
    assert cells[1:4] == ["not running", "20", "-"] and cells[5] == "0"


def test_folders_of_one_run_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with `log_dir` has checkpoints in another folder, whose name does not tell its state."""
    run, other, save = made(tmp_path / "run"), made(tmp_path / "other"), tmp_path / "save"
    append(run, {"event": "end", "status": 0, "why": "status 0, finished"})
    (save / "global_step10").mkdir(parents=True)
    (save / "global_step10" / "manifest.json").write_text("{}")
    lines = (run / "launches.jsonl").read_text().replace(f'"save": "{run}"', f'"save": "{save}"')
    (run / "launches.jsonl").write_text(lines)
    for folders in ([save, run, other], [run / ".", save, other, run, other / "global_step10"]):
        cells = [line for line in table(capsys, *folders) if len(line) == 6]
        assert [line[:2] for line in cells] == [[str(run), "finished"], [str(other), "killed"]]
    assert table(capsys, save)[0][:2] == [str(save), "not running"]


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert f"{tmp_path}: no run; give folders with metrics.jsonl" in capsys.readouterr().err
