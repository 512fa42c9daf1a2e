"""Jobs one after the other, and runs beside each other: each trains, and none overwrites another's results."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from tests.integration.hooks import Hook

STEPS = 12


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_every_job_of_a_chain_trains(live: Any, tmp_path: Path) -> None:
    """`exit_interval` stops each at the next multiple, and the mean loss of an interval survives the stops."""
    keys = {"extra_save_iters": [0], "log_interval": 4, "eval_iters": 0, "auto_resume": True}
    live(keys | {"save": str(tmp_path / "whole")})
    live({"save": str(tmp_path / "each"), "log_interval": 1, "eval_iters": 0})
    reached = []
    for _ in range(3):
        live(keys | {"save": str(tmp_path / "chain"), "exit_interval": 5})
        reached.append(native.steps(tmp_path / "chain")[-1])
    assert reached == [5, 10, STEPS] and native.steps(tmp_path / "chain") == [0, 5, 10, STEPS]
    each, whole, chain = (losses(tmp_path / name) for name in ("each", "whole", "chain"))
    assert list(whole) == [4, 8, 12] and {step: chain[step] for step in whole} == whole
    for last in whole:
        assert whole[last] == pytest.approx(sum(each[step] for step in range(last - 3, last + 1)) / 4, abs=1e-12)


@pytest.mark.slow
def test_the_initial_weights_can_be_resumed_from(live: Any, tmp_path: Path) -> None:
    keys = {"log_interval": 1, "eval_iters": 0}
    live(keys | {"save": str(tmp_path / "one"), "extra_save_iters": [0]})
    live(keys | {"save": str(tmp_path / "other"), "load": str(tmp_path / "one"), "iteration": 0})
    assert losses(tmp_path / "one") == losses(tmp_path / "other")


@pytest.mark.slow
def test_two_runs_at_a_time_lose_no_figure(server: Any, train: Any, tmp_path: Path) -> None:
    shared = {"log_dir": str(tmp_path / "logs"), "log_interval": 1, "eval_iters": 0, "watchdog_timeout": None}
    first = server.start(shared | {"save": str(tmp_path / "a")}, 1, [Hook("step", "suspend", [8])])
    metrics = tmp_path / "logs" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 7:
        assert first.wait(0.1) is None, first.output()
    second = train(shared | {"save": str(tmp_path / "b")})
    first.send(signal.SIGCONT)
    assert second.status == 2 and "in use by another run" in second.output, second.output
    assert first.end() == [0], first.output()
    assert list(losses(tmp_path / "logs")) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_an_unreachable_weights_and_biases_server_does_not_end_a_run(server: Any, tmp_path: Path) -> None:
    environment = {"WANDB_API_KEY": "0" * 40, "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    keys = {"save": str(tmp_path / "run"), "use_wandb": True, "wandb_host": "http://127.0.0.1:9", "eval_iters": 0}
    launch = server.start(keys, environment=environment)
    assert launch.end() == [0], launch.output()
    output = launch.output()
    assert "metrics stay on disk" in output and "`wandb sync " in output
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
