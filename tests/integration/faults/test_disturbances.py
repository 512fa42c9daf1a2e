"""Real faults of ranks, steps and disks: the run reports them, ends as documented and loses no data."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from megatron_coca.training.engine.peers import GRACE
from tests.integration.hooks import HOOKED, Hook
from tests.integration.killing import left_alive

TWO = ("--num_gpus", "2")
PROMPT = 30.0
"""Seconds within which the end of a rank must have ended the others on a busy machine; collectives wait 40 minutes."""
PAIR = {"train_batch_size": 8, "eval_iters": 0}


@pytest.mark.parametrize(
    ("action", "status", "said"),
    [
        (
            "raise",
            1,
            (
                "the first error, of rank 1:\nTraceback",
                "RuntimeError: a fault that nobody foresaw",
                "on rank 1 of 2",
                "rank 1 ended with exit status 1",
            ),
        ),
        pytest.param("kill", 137, ("rank 1 was ended by SIGKILL",), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run(
    action: str, status: int, said: tuple[str, ...], train: Any, tmp_path: Path
) -> None:
    hooks = json.dumps([Hook("backward", action, [7], [1])])
    finished = train(
        PAIR | {"save": str(tmp_path), "checkpoint_factor": 1}, options=TWO, before=HOOKED, environment={"HOOKS": hooks}
    )
    took = time.time() - (tmp_path / "metrics.jsonl").stat().st_mtime
    assert finished.status == status and took < PROMPT, f"{took} s: {finished.output}"
    for text in said:
        assert text in finished.output, finished.output
    assert "stopping the others" in finished.output and not left_alive(tmp_path)
    newest = native.steps(tmp_path)[-1]
    native.verify(native.step_folder(tmp_path, newest))


@pytest.mark.parametrize(
    ("point", "victim"), [("background group", 1), ("background group", 0), ("own files", 1), ("backward", 0)]
)
@pytest.mark.slow
def test_a_lost_rank_ends_the_other_without_a_launcher(point: str, victim: int, server: Any, tmp_path: Path) -> None:
    """A group that is being made waits for the lost rank for a day, and other collectives for 40 minutes."""
    keys = PAIR | {"save": str(tmp_path), "checkpoint_factor": 2}
    launch = server.start(keys, 2, [Hook(point, "kill", [1], [victim])])
    begin, statuses = time.monotonic(), launch.end()
    assert statuses == ([-9, 1] if victim == 0 else [1, -9]), launch.output()
    assert time.monotonic() - begin < GRACE + PROMPT
    assert f"rank {victim} on {socket.gethostname()} had already ended" in launch.output() or (
        f"rank {victim} on {socket.gethostname()} has ended, but this process" in launch.output()
    )


@pytest.mark.parametrize(
    ("action", "statuses", "reports"),
    [
        ("wait", [76, 76], [0, 1]),
        pytest.param("spin", [76, 76], [0, 1], marks=pytest.mark.slow),
        pytest.param("suspend", [76, -signal.SIGKILL], [0], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_rank_that_hangs(action: str, statuses: list[int], reports: list[int], server: Any, tmp_path: Path) -> None:
    keys = PAIR | {"save": str(tmp_path), "watchdog_timeout": 5.0}
    launch = server.start(keys, 2, [Hook("backward", action, [7], [1])])
    assert launch.end() == statuses, launch.output()
    stacks = {int(path.stem[-1]): path.read_text() for path in tmp_path.glob("hang_rank_*.txt")}
    assert sorted(stacks) == reports
    assert "the main thread waits for other ranks in" in stacks[0]
    assert "the last heartbeat was 'step 3'" in stacks[0] and all(
        f" in _{action}" in text for rank, text in stacks.items() if rank
    )


BAD = 3
"""Completed steps before the bad one."""
FAULTS = {
    "a gradient that is not a number": Hook("backward", "nan", [2 * BAD + 1], [1]),
    "an infinite loss": Hook("forward", "inf", [2 * BAD + 2], [0]),
}
POLICIES = {"skip": 0, "stop": 77}
ORDINARY = {(2, "skip"), (3, "stop")}
PAIRS = [
    (stage, policy, fault)
    for stage in range(4)
    for number, policy in enumerate(POLICIES)
    for other, fault in enumerate(FAULTS)
    if (stage, policy) in ORDINARY or (stage + number + other) % 2
]
"""Every pair of stage, policy and fault."""


@pytest.mark.parametrize(
    ("stage", "policy", "fault"),
    [
        pytest.param(
            stage,
            policy,
            fault,
            id=f"ZeRO {stage}, {policy}, {fault}",
            marks=[] if (stage, policy) in ORDINARY and FAULTS[fault].action == "nan" else [pytest.mark.slow],
        )
        for stage, policy, fault in PAIRS
    ],
)
def test_a_bad_step_on_one_of_two_ranks(
    stage: int, policy: str, fault: str, live: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    keys = PAIR | {"nonfinite_policy": policy, "checkpoint_factor": 1, "train_iters": 6}
    finished = live(keys | {"zero_stage": stage, "save": str(tmp_path)}, [FAULTS[fault]], 2, POLICIES[policy])
    what = "loss is inf" if "loss" in fault else "gradient norm is "
    assert f"step {BAD + 1}: {what}" in finished.output, finished.output
    run, taken = open_run(tmp_path), native.steps(tmp_path)
    newest = native.read_json(native.step_folder(tmp_path, taken[-1]) / native.META)["progress"]
    if policy == "stop":
        assert taken == [1, 2, 3] and f"step {BAD} is saved" in finished.output
    else:
        assert_same_state(*({k: v for k, v in run.state(at).items() if "rng" not in k} for at in (BAD, BAD + 1)))
        assert run.weights(BAD) == run.weights(BAD + 1) != run.weights(BAD + 2)
        assert newest["skipped"] == 1


def test_bad_steps_that_do_not_end(live: Any, tmp_path: Path) -> None:
    common = {"save": str(tmp_path), "checkpoint_factor": 3, "max_consecutive_skips": 2, "eval_iters": 0}
    bad = Hook("backward", "nan", list(range(2 * BAD + 1, 100)))
    output = live(common, [bad], expected=77).output
    assert "3 steps in a row were bad" in output and f"load={tmp_path} iteration=STEP" in output
    assert native.steps(tmp_path) == [BAD]


@pytest.mark.parametrize("policy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("off", "warn")), "skip"])
def test_a_spike(policy: str, live: Any, open_run: Any, tmp_path: Path) -> None:
    spikes = {"loss_spike_policy": policy, "loss_spike_window": 16, "loss_spike_factor": 40.0}
    keys = spikes | {"save": str(tmp_path), "checkpoint_factor": 9, "eval_iters": 0}
    output = live(keys, [Hook("backward", "spike", [19, 20])]).output
    run = open_run(tmp_path)
    progress = native.read_json(native.step_folder(tmp_path, 12) / native.META)["progress"]
    assert ("step 10: gradient norm " in output) == (policy != "off")
    assert len(run.losses) == 12
    assert progress["skipped"] == (policy == "skip")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that holds one checkpoint of `small` and part of another."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system to fill")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(live: Any, full_disk: Path, open_run: Any) -> None:
    save = full_disk / "run"
    finished = live({"save": str(save), "checkpoint_factor": 4, "eval_iters": 0}, expected=2)
    assert "step 8 cannot be written (No space left" in finished.output
    assert native.steps(save) == [4] and not list(save.glob(".*partial"))
    native.verify(native.locate(save))
