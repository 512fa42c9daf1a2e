"""A run that is stopped and resumed ends in the same bits as an uninterrupted run."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hooks import Hook

STEPS = 12
STOPS = (1, 5, 7)


def run_with_stops(live: Any, folder: Path, stops: Sequence[int], changes: dict[str, Any], ranks: int = 1) -> None:
    """Train into `folder`, ending the process at each of `stops` and rerunning the same command."""
    keys = {"save": str(folder), "load": str(folder), **changes}
    for stop in (*stops, STEPS):
        live(keys | {"exit_interval": stop}, ranks=ranks)


def assert_same_run(one: Any, other: Any, assert_same_state: Any) -> None:
    assert len(one.losses) == STEPS == len(set(one.losses))
    assert one.records == other.records, "losses, gradient norms, learning rates and validation losses"
    assert one.weights(STEPS) == other.weights(STEPS)
    assert_same_state(one.state(STEPS), other.state(STEPS))


@pytest.mark.always
def test_stopping_changes_no_bit(live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path) -> None:
    run_with_stops(live, tmp_path, STOPS, {})
    folders = {f"global_step{step}" for step in (*STOPS, STEPS)}
    assert {path.name for path in tmp_path.glob("global_step*")} == folders
    assert_same_run(open_run(tmp_path), whole, assert_same_state)


def layout(name: str, ranks: int, stops: Sequence[int] = (5,), slow: bool = True, **changes: Any) -> Any:
    keys = {"train_batch_size": 8, **changes} if ranks > 1 else changes
    return pytest.param(ranks, stops, keys, id=name, marks=[pytest.mark.slow] if slow else [])


CLEX = {"rope_scaling": {"rope_type": "clex"}}
PLAIN = {"zero_stage": 3, "attention_dropout": 0.0}
SYNTHETIC = {
    "synthetic": {"task": "recall", "facts": 2, "keys": 4, "values": 4, "filler_tokens": 8},
    "training_positions": {"type": "randomized", "max": "16L"},
    **dict.fromkeys(("train_data_paths", "valid_data_paths", "test_data_paths")),
}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
LAYOUTS = [
    layout("a synthetic task with drawn positions", 1, STOPS, slow=False, **SYNTHETIC),
    layout("ZeRO 3 in two processes", 2, zero_stage=3),
    layout("ZeRO 3, learned frequencies", 1, zero_stage=3, **CLEX),
    layout("ZeRO 1 in two processes", 2, zero_stage=1),
    layout("ZeRO 2, learned frequencies, three stops", 1, STOPS, zero_stage=2, **CLEX),
    layout("Lion under ZeRO 1", 2, zero_stage=1, **{"optimizer.type": "lion", "optimizer.params.lr": 1e-4}),
    layout("a bias by layer", 2, pos_emb="kerple_log", **PLAIN),
    layout("a shared bias", 2, pos_emb="rpe", **PLAIN),
    layout("a map", 2, relative_positions={"type": "inv_leaky_rerope", "target_length": 256}, **PLAIN),
    layout("learned frequencies in two processes", 2, **CLEX, **PLAIN),
    layout("native engine", 1, STOPS, engine="native"),
    layout("native engine, bf16, learned frequencies", 1, STOPS, engine="native", precision="bfloat16", **CLEX),
    layout("native engine in two processes, Lion", 2, engine="native", **{"optimizer.type": "lion"}),
    layout("native engine in two processes, Muon", 2, engine="native", **{"optimizer.type": "muon"}),
    layout("native engine, bf16 summed in fp32", 2, engine="native", precision="bfloat16", **IN_FP32),
    layout("bf16", 1, STOPS, precision="bfloat16", zero_stage=1),
    layout("bf16 summed in fp32", 2, precision="bfloat16", zero_stage=1, **IN_FP32),
]


@pytest.mark.parametrize(("ranks", "stops", "changes"), LAYOUTS)
def test_stopping_changes_no_bit_in_other_layouts(
    live: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
    ranks: int,
    stops: Sequence[int],
    changes: dict[str, Any],
) -> None:
    run_with_stops(live, tmp_path / "whole", (), changes, ranks)
    run_with_stops(live, tmp_path / "stopped", stops, changes, ranks)
    assert_same_run(open_run(tmp_path / "whole"), open_run(tmp_path / "stopped"), assert_same_state)


@pytest.mark.always
def test_a_killed_run_resumes_with_the_same_command(
    server: Any, live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    keys = {"save": str(tmp_path), "load": str(tmp_path), "checkpoint_factor": 2}
    assert server.start(keys, hooks=[Hook("step", "kill", (7,))]).end() == [-signal.SIGKILL]
    left = [path.name for path in tmp_path.glob("global_step*")]
    assert left and "global_step12" not in left
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill can leave of a line
    assert "resuming at step" in live(keys).output
    assert_same_run(open_run(tmp_path), whole, assert_same_state)
