"""SIGKILL at every kind of moment of a step, a save and an evaluation. The same command resumes, and the run ends in
the same bits as an uninterrupted run.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from tests.integration.hooks import POINTS, Hook, found

STEPS = 12
KEYS = {"auto_resume": True, "checkpoint_factor": 2, "keep_last_n_checkpoints": 2, "train_batch_size": 8}
"""Four micro batches a step in one process, two in each of two."""

MOMENTS: dict[str, Hook] = {
    "within the first step's micro batches": Hook("backward done", "kill"),
    "before the background save": Hook("snapshot", "kill"),
    "a save that has begun": Hook("save begun", "kill"),
    "before a rank's files": Hook("own files", "kill", ranks=[1]),
    "after a rank's files": Hook("own files done", "kill", ranks=[0]),
    "after the weights": Hook("weights done", "kill"),
    "before the manifest": Hook("commit", "kill"),
    "after the manifest": Hook("manifest done", "kill", [2]),
    "between the rename and `latest`": Hook("renamed", "kill"),
    "within the restoring": Hook("restore", "kill"),
    "after `latest`": Hook("latest done", "kill"),
    "within the micro batches after a resume": Hook("backward done", "kill", [6]),
    "in the second save of a launch": Hook("own files", "kill", [2]),
    "in an evaluation": Hook("evaluation", "kill"),
    "in the removal of an old checkpoint": Hook("removal", "kill"),
}
"""How one launch after the other ends."""
QUICK = (
    "within the first step's micro batches",
    "after a rank's files",
    "after the weights",
    "after the manifest",
    "between the rename and `latest`",
    "within the restoring",
    "in an evaluation",
    "in the removal of an old checkpoint",
)
SHORTER = (
    "before a rank's files",
    "after a rank's files",
    "between the rename and `latest`",
    "in an evaluation",
    "in the removal of an old checkpoint",
)


def test_every_point_of_the_hooks_exists() -> None:
    """A point whose function was renamed would fail only in the slow tests that use it."""
    assert all(callable(getattr(*found(point))) for point in POINTS.values())


def assert_same_end(run: Any, whole: Any, assert_same_state: Any) -> None:
    assert len(whole.losses) == STEPS
    assert run.records == whole.records, "losses, gradient norms, learning rates and validation losses"
    assert run.weights(STEPS) == whole.weights(STEPS)
    assert_same_state(run.state(STEPS), whole.state(STEPS))


NATIVE = {"engine": "native", "precision": "bfloat16"}
LAYOUTS = [
    pytest.param(1, {}, QUICK, id="one process"),
    pytest.param(1, {}, tuple(MOMENTS), id="one process, all moments", marks=pytest.mark.slow),
    pytest.param(1, NATIVE, tuple(MOMENTS), id="native engine in one process", marks=pytest.mark.slow),
    *(
        pytest.param(2, keys, moments, id=name, marks=pytest.mark.slow)
        for name, keys, moments in (
            ("ZeRO 0 in two processes", {}, SHORTER),
            ("ZeRO 1 in two processes", {"zero_stage": 1}, SHORTER),
            ("ZeRO 2 in two processes", {"zero_stage": 2}, SHORTER),
            ("ZeRO 3 in two processes", {"zero_stage": 3}, tuple(MOMENTS)),
            ("native engine in two processes", NATIVE, tuple(MOMENTS)),
            ("two pipeline stages", {"pipe_parallel_size": 2}, QUICK),
            ("two tensor ranks", {"model_parallel_size": 2}, SHORTER),
            ("two sequence ranks", {"sequence_parallel_size": 2}, SHORTER),
            ("two ranks of a ring", {"context_parallel_size": 2, "attention_dropout": 0.0}, QUICK),
        )
    ),
]


def reached(hook: Hook, ranks: int, keys: dict[str, Any]) -> Hook:
    """The same moment in another layout: other code runs the backward pass, and a single rank has no second one."""
    others = {"pipe_parallel_size": "stage done", "engine": "native backward done"}
    if hook.point == "backward done":
        hook = hook._replace(point=next((others[key] for key in keys if key in others), hook.point))
    return hook._replace(ranks=[]) if ranks == 1 else hook


@pytest.mark.parametrize(("ranks", "keys", "moments"), LAYOUTS)
def test_an_interrupted_run_ends_as_one_never_stopped(
    ranks: int,
    keys: dict[str, Any],
    moments: tuple[str, ...],
    live: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    live(KEYS | keys | {"save": str(whole)}, ranks=ranks)
    for name in moments:
        hook = reached(MOMENTS[name], ranks, keys)
        killed = live(KEYS | keys | {"save": str(run)}, [hook], ranks, expected=None)
        assert killed.status == -signal.SIGKILL, f"not reached: {name}\n{killed.output[-2000:]}"
    live(KEYS | keys | {"save": str(run)}, ranks=ranks)
    # A launch that is killed in the removal after its last save leaves an old checkpoint, and nothing to train.
    assert native.steps(run)[-2:] == [STEPS - 2, STEPS] and not list(run.glob("*.partial"))
    assert_same_end(open_run(run), open_run(whole), assert_same_state)
