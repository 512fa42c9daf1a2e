"""The record of a run's launches, and the decisions after an end."""

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.training.launches import (
    LAUNCHES,
    NO_RECORD,
    REQUEUED,
    LaunchRecord,
    StepFailure,
    append,
    decide,
    first_failure,
    read_launches,
)
from megatron_coca.work.statuses import EXIT_STATUSES, HUNG, MEANINGS, PREEMPTED, Preempted, meaning


def launch(folder: Path, step: int, error: BaseException | None = None) -> None:
    """Record a launch from `step`; a missing `error` means an orderly end."""
    with pytest.raises(type(error)) if error is not None else LaunchRecord(folder, False):  # noqa: SIM117
        with LaunchRecord(folder, True) as record:
            record.start(step, 100, ["n0", "n0", "n1"], str(folder))
            if error is not None:
                raise error


def test_a_start_names_the_end_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    launch(tmp_path, 0, Preempted("SIGTERM"))
    LaunchRecord(tmp_path, True).start(10, 100, ["n0"], None)  # killed
    launch(tmp_path, 20, OSError("disk\nmore"))
    append(tmp_path, {"event": REQUEUED, "why": "status 137, SIGKILL (n1: Killed)", "job": "7"})
    launch(tmp_path, 30, KeyboardInterrupt())
    launch(tmp_path, 40)
    starts = [line for line in read_launches(tmp_path) if line["event"] == "start"]
    assert [(line["step"], line["why"]) for line in starts] == [
        (0, "first start"),
        (10, meaning(PREEMPTED)),
        (20, NO_RECORD),
        (30, "status 137, SIGKILL (n1: Killed)"),
        (40, "status 130, Ctrl-C"),
    ]
    assert starts[0]["nodes"] == ["n0", "n1"] and starts[0]["ranks"] == 3 and starts[0]["job"] == "7"
    assert read_launches(tmp_path)[-1]["status"] == 0


def test_a_line_that_a_kill_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    launch(tmp_path, 0)
    path = tmp_path / LAUNCHES
    path.write_bytes(path.read_bytes()[:-9])
    launch(tmp_path, 5)
    assert [line["event"] for line in read_launches(tmp_path)] == ["start", "start", "end"]


def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LAUNCHES).symlink_to(tmp_path / "elsewhere")
    launch(tmp_path, 0)
    assert not (tmp_path / "elsewhere").exists() and "the run continues" in caplog.text


@pytest.mark.parametrize(
    ("errors", "text", "node"),
    [
        ("", None, None),
        ("a log line\nsrun: error: n1: task 1: Killed\nsrun: error: n0: task 0: Killed", "n1: Killed", "n1"),
        ("srun: error: gpu-07: tasks 8-15: Segmentation fault", "gpu-07: Segmentation fault", "gpu-07"),
        ("srun: error: n1: task 1: Exited with exit code 1", "n1: Exited with exit code 1", "n1"),
        (f"srun: error: n1: task 1: Exited with exit code {HUNG}", f"n1: Exited with exit code {HUNG}", None),
        ("srun: error: n[0-1]: tasks 0-1: Exited with exit code 1", "n[0-1]: Exited with exit code 1", None),
        (
            "srun: error: n0: task 0: Exited with exit code 1\nsrun: error: n1: task 1: Killed",
            "n1: Killed",
            "n1",
        ),
        (
            "srun: error: n0: task 0: Exited with exit code 1\nsrun: First task exited 60s ago\n"
            "srun: error: n1: task 1: Killed",
            "n0: Exited with exit code 1",
            "n0",
        ),
        (  # the host of task 1 is lost, and rank 0 reports a closed connection
            "srun: error: n0: task 0: Exited with exit code 1\nsrun: First task exited 60s ago\n"
            "srun: StepId=1.0 task 1: running\nsrun: StepId=1.0 task 0: exited abnormally",
            "n0: Exited with exit code 1; task 1 did not end",
            None,
        ),
        ("srun: error: Node failure on n2", "node failure on n2", "n2"),
    ],
)
def test_the_messages_of_srun_name_the_node(errors: str, text: str | None, node: str | None) -> None:
    found = first_failure(errors)
    assert found == (None if text is None else StepFailure(text, node))


def requeued(step: int, node: str | None = None, job: str = "7") -> dict[str, Any]:
    return {"event": REQUEUED, "step": step, "node": node, "job": job}


def test_a_newer_checkpoint_and_another_job_start_the_count_again() -> None:
    failure = StepFailure("n1: Killed", "n1")
    assert decide([requeued(10)] * 2, 137, 10, "7", failure, 3).requeue
    assert not decide([requeued(10)] * 3, 137, 10, "7", failure, 3).requeue
    assert decide([requeued(10)] * 3, 137, 11, "7", failure, 3).requeue
    assert decide([requeued(10, "n1", "6")] * 3, 137, 10, "7", failure, 3) == (
        True,
        "status 137, SIGKILL (n1: Killed)",
        (),
    )
    assert decide([requeued(1, "n1"), requeued(2, "n0")], 137, 3, "7", failure, 3).excluded == ("n1",)


def test_every_status_has_a_meaning() -> None:
    assert set(EXIT_STATUSES) == set(MEANINGS)
    assert meaning(128 + signal.SIGSEGV) == "status 139, SIGSEGV" and meaning(99) == "status 99"
