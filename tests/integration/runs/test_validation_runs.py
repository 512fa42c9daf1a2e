"""Perplexities at longer windows in real runs: reported everywhere, in every layout, without an effect on training."""

import json
from pathlib import Path
from typing import Any

import pytest

WATCHED: dict[str, Any] = {"eval_windows": ["1L", "4L", 50]}
PERPLEXITIES = {f"validation_perplexity_{window}" for window in ("1L", "4L", "50")}


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if name in line]


@pytest.mark.slow
def test_training_has_the_same_bits_with_and_without(
    live: Any, whole: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """Also over a resume, of a run with dropout."""
    board = tmp_path / "board"
    keys = WATCHED | {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "tensorboard_dir": str(board)}
    outputs = [live(keys | {"exit_interval": stop}).output for stop in (7, 12)]
    run = open_run(tmp_path / "run")
    assert run.losses == whole.losses
    assert run.weights(12) == whole.weights(12)
    assert_same_state(run.state(12), whole.state(12))
    reports = lines(run.folder, "validation_loss")
    assert [line["step"] for line in reports] == [6, 12] and all(line.keys() >= PERPLEXITIES for line in reports)
    assert all(1 < line[name] < 512 for line in reports for name in PERPLEXITIES)
    assert "perplexity 4L" in outputs[0]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(board))
    events.Reload()
    assert [each.step for each in events.Scalars("validation_perplexity_4L")] == [6, 12]


PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "train_iters": 6, "train_batch_size": 8}
PLAIN |= {"init_method_std": 0.2, "no_weight_tying": False, "eval_interval": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"model_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "pipeline": {"pipe_parallel_size": 2},
}


@pytest.mark.slow
def test_every_layout_reports_the_same(live: Any, tmp_path: Path) -> None:
    """Between steps, so that those after a validation are tested too."""
    keys = PLAIN | WATCHED
    live(keys | {"log_dir": str(tmp_path / "alone")})
    wanted = lines(tmp_path / "alone", "validation_loss")
    assert len(wanted) == 3
    for name, layout in LAYOUTS.items():
        live(keys | layout | {"log_dir": str(tmp_path / name)}, ranks=2)
        found = lines(tmp_path / name, "validation_loss")
        assert found == [pytest.approx(line, rel=1e-4) for line in wanted], name
    for name in ("ZeRO 3", "pipeline"):
        without = tmp_path / f"{name} without"
        live(PLAIN | LAYOUTS[name] | {"log_dir": str(without)}, ranks=2)
        losses = [[line["loss"] for line in lines(folder, "loss")] for folder in (tmp_path / name, without)]
        assert losses[0] == losses[1] and len(losses[0]) == 6, name


def test_impossible_reports_are_errors(live: Any) -> None:
    told = live({"eval_windows": ["4x"]}, expected=2).output
    assert "eval_windows: '4x' is neither a number" in told
