"""Reports of real runs: figures in every sink, also after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.figures import TIMINGS

STEPS = 12
STOP = 5


def sources(small: dict[str, Any]) -> dict[str, Any]:
    """Two validation sources: the shards of the small corpus."""
    return {"valid_data_paths": small["train_data_paths"] + small["valid_data_paths"], "eval_iters": 2}


@pytest.mark.slow
def test_every_sink_over_a_resume(server: Any, small: dict[str, Any], tmp_path: Path) -> None:
    run, board = tmp_path / "run", tmp_path / "board"
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    keys = sources(small) | {"save": str(run), "load": str(run), "tensorboard_dir": str(board), "use_wandb": True}
    keys |= {"profile": True, "profile_step_start": 2, "profile_step_stop": 4, "peak_theoretical_tflops": 0.001}
    # The first launch ends beyond its last checkpoint, as one that was killed: steps 4 and 5 are repeated.
    for changes in ({"exit_interval": STOP}, {"iteration": 3}):
        launch = server.start(keys | {"extra_save_iters": [3]} | changes, environment=offline)
        assert launch.end() == [0], launch.output()
        assert all(text in launch.output() for text in ("step 5/12: loss ", "MFU", "ETA"))
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in reports if "loss" in line] == list(range(1, STEPS + 1))
    assert all(
        line.keys() >= TIMINGS and line["mfu"] > 0 and line["data_wait"] < 1 for line in reports if "loss" in line
    )
    names = {"step", "validation_loss", "validation_loss/words_train", "validation_loss/words_test"}
    assert [line["step"] for line in reports if line.keys() >= names] == [6, 12]
    assert len(list((run / "profile").glob("trace_steps_*_rank_0.json"))) == 2
    assert json.loads((run / "profile" / "trace_steps_3-4_rank_0.json").read_text())["traceEvents"]
    check_tensorboard(board)
    identity = json.loads((run / "wandb.json").read_text())
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    assert identity["step"] == STEPS
    assert len(folders) == 2 and all(folder.name.endswith(identity["id"]) for folder in folders)


def check_tensorboard(folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert [each.step for each in events.Scalars("validation_loss/words_test")] == [6, 12]
