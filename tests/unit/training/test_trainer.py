"""The training loop after steps that go wrong, with an engine that the test controls."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece
from megatron_coca.data import Batch
from megatron_coca.training.checkpointing.saving import Checkpoints
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.engine import HeldOutLoss, StepResult
from megatron_coca.training.monitoring.loss_guard import Limits, bad_reason
from megatron_coca.training.trainer import Trainer
from megatron_coca.work.signals import CaughtSignals
from megatron_coca.work.statuses import Diverged, Preempted
from tests.one_rank import context_of_one_rank, only_stage


class CountingEngine:
    """An engine with losses from the test. Its weight counts the steps that changed it."""

    copies: frozenset[str] = frozenset()
    device = torch.device("cpu")
    partitioned, loss_scale, module, labels = False, None, torch.nn.Linear(1, 1), 1

    def __init__(self, loss: Callable[[int], float]) -> None:
        self.weight, self.calls, self._loss = torch.zeros(1), 0, loss
        self.read: list[bytes] = []

    def train_step(self, batches: Sequence[Batch], rate: float, limits: Limits) -> StepResult:
        loss = self._loss(self.calls)
        self.calls += 1
        self.read.append(b"".join(np.ascontiguousarray(batch.tokens).tobytes() for batch in batches))
        taken = bad_reason(loss, 1.0, limits) is None
        self.weight += taken
        return StepResult(loss, 1.0, not taken, self.labels)

    def mean_loss(self, batches: Sequence[Batch]) -> HeldOutLoss:
        return HeldOutLoss(1.0, 1)

    def pieces(self) -> list[StatePiece]:
        return [StatePiece("w", WEIGHT, 0, self.weight)]

    def parameter_slices(self) -> dict[str, ParameterSlice]:
        return {"w": ParameterSlice((1,))}

    def counters(self) -> dict[str, float]:
        return {"step": 0.0}

    def restored(self, counters: dict[str, float]) -> None:
        pass


Run = Callable[..., CountingEngine]


@pytest.fixture
def run(opened: Corpus, tmp_path: Path, one_rank: None) -> Run:
    """run(loss by call, **keys): the engine after a run of ten steps that saves after each."""

    def train(loss: Callable[[int], float], preemption: CaughtSignals | None = None, **keys: Any) -> CountingEngine:
        fixed = {"save": str(tmp_path / "run"), "eval_interval": 100}
        keys = {**fixed, "checkpoint_factor": 1, "train_iters": 10, **keys}
        config = opened.config.override(keys)
        opened_stage = only_stage(Corpus(config, opened.train, opened.valid, opened.tokenizer))
        engine, context = CountingEngine(loss), context_of_one_rank(config.checkpoint, preemption)
        checkpoints = Checkpoints(opened_stage, engine, context)  # type: ignore[arg-type]
        Trainer(opened_stage, engine, checkpoints, context).run()  # type: ignore[arg-type]
        return engine

    return train


def events(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line["event"] for line in lines if "event" in line]


def nan_at(*calls: int) -> Callable[[int], float]:
    return lambda call: math.nan if call in calls else 1.0


def test_a_run_without_faults(run: Run, tmp_path: Path) -> None:
    engine = run(nan_at())
    assert engine.calls == 10 and float(engine.weight) == 10 and len(set(engine.read)) == 10
    assert native.steps(tmp_path / "run") == list(range(1, 11)) and events(tmp_path) == []


def test_the_initial_weights_are_saved_on_request(run: Run, tmp_path: Path) -> None:
    run(nan_at(), checkpoint_factor=None, extra_save_iters=[0, 4])
    assert native.steps(tmp_path / "run") == [0, 4, 10]


def test_a_skipped_step_changes_nothing(run: Run, tmp_path: Path) -> None:
    engine = run(nan_at(3, 4))
    assert engine.calls == 10 and float(engine.weight) == 8
    assert any("loss is nan" in each for each in events(tmp_path))


def test_too_many_skipped_steps_stop_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"stopped at step 7: .*3 steps .*; step 6 is saved") as stopped:
        run(nan_at(*range(4, 10)), max_consecutive_skips=2)
    assert f"set load={tmp_path / 'run'} iteration=STEP without auto_resume" in str(stopped.value)


def test_a_run_that_stops_without_a_checkpoint_names_none(run: Run) -> None:
    with pytest.raises(Diverged, match=r"step 1: loss is nan; nothing is saved$"):
        run(nan_at(0), nonfinite_policy="stop", checkpoint_factor=5)


def test_a_preempted_run_saves_where_it_is(run: Run, tmp_path: Path) -> None:
    preemption = CaughtSignals()

    def loss(call: int) -> float:
        preemption.requested = "SIGTERM" if call == 3 else None
        return 1.0

    with pytest.raises(Preempted, match=r"preempted \(SIGTERM\); step 4 is saved"):
        run(loss, preemption, checkpoint_factor=100)
    assert native.steps(tmp_path / "run") == [4]


def at(call: int, action: Callable[[], object]) -> Callable[[int], float]:
    """Losses of an ordinary run, in one step of which something happens to the disk."""

    def loss(now: int) -> float:
        if now == call:
            action()
        return 1.0

    return loss


def test_a_deleted_save_folder_is_made_again(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run(at(3, lambda: shutil.rmtree(folder)), checkpoint_factor=9)
    assert native.steps(folder) == [9, 10]
    native.verify(native.step_folder(folder, 10))
