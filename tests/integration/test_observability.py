"""What real runs report: figures in every sink, across a resume, and anomalies."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.figures import TIMINGS

STEPS = 12
STOP = 5

SLOW = """
import os, runpy, sys, time
import {module} as module
usual = module.{place}
def slow(*arguments, **named):
    time.sleep({seconds} if os.environ["RANK"] == "1" else 0)
    return usual(*arguments, **named)
module.{place} = slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def sources(small: dict[str, Any]) -> dict[str, Any]:
    """Two validation sources: the shards of the small corpus."""
    return {"valid_data_paths": small["train_data_paths"] + small["valid_data_paths"], "eval_iters": 2}


@pytest.mark.slow
def test_every_sink_over_a_resume(server: Any, small: dict[str, Any], tmp_path: Path) -> None:
    run, board = tmp_path / "run", tmp_path / "board"
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    keys = sources(small) | {"save": str(run), "load": str(run), "tensorboard_dir": str(board), "use_wandb": True}
    keys |= {"profile": True, "profile_step_start": 2, "profile_step_stop": 4, "peak_theoretical_tflops": 0.001}
    keys |= {"sample_prompts": ["the sea"]}
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
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))


def check_tensorboard(folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    assert [each.step for each in events.Scalars("loss")] == list(range(1, STEPS + 1))
    assert [each.step for each in events.Scalars("validation_loss/words_test")] == [6, 12]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "place", "told"),
    [
        ("megatron_coca.model.gpt", "LanguageModelLoss.forward", "rank 1 ({host}) is slow: a forward pass takes"),
        ("megatron_coca.data", "Loader.micro_batches", "of the time is spent waiting for data, on rank 1 ({host})"),
    ],
    ids=["straggler", "slow data"],
)
def test_a_rank_that_holds_up_the_others_is_named(
    start: Any, open_run: Any, tmp_path: Path, module: str, place: str, told: str
) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW.format(module=module, place=place, seconds=0.7))
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    group |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    keys = {"save": str(tmp_path / "run"), "train_batch_size": 8, "train_iters": 20, "eval_interval": 100}
    processes = [
        start(keys, before=(str(script),), environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    (event,) = open_run(tmp_path / "run").events
    assert told.format(host=os.uname().nodename) in event
    assert sum(output.count(event) for output in outputs) == 1, "one line, from the first rank"
