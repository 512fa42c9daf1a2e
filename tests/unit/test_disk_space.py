"""The disk that the checkpoints of a run need."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_coca.checkpoints import native
from megatron_coca.config import Config, load_config
from megatron_coca.training import saving
from megatron_coca.training.optimizer import trainable_share
from megatron_coca.training.saving import (
    added_checkpoints,
    checkpoint_bytes,
    due_steps,
    is_due,
    warn_of_full_disk,
)
from tests.conftest import SMALL

MIB = 1 << 20


def config(**keys: Any) -> Config:
    return load_config([], SMALL | keys)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"checkpoint_factor": 1},
        {"checkpoint_factor": 7},
        {"checkpoint_factor": 7, "extra_save_iters": [0, 3, 14, 99, 1000]},
        {"checkpoint_factor": 2, "checkpoint_scale": "log"},
        {"checkpoint_factor": 3, "checkpoint_scale": "log", "extra_save_iters": [5]},
    ],
)
@pytest.mark.parametrize("start", [0, 1, 6, 7, 27, 100])
def test_due_steps_are_those_at_which_the_loop_saves(keys: dict[str, Any], start: int) -> None:
    checkpoint = config(**keys).checkpoint
    expected = {step for step in range(start + 1, 101) if is_due(step, checkpoint) or step == 100}
    assert due_steps(checkpoint, start, 100) == expected


@pytest.mark.parametrize(
    ("keys", "saved", "step", "added"),
    [
        ({}, [], 0, 1),
        ({"checkpoint_factor": 10}, [], 0, 10),
        ({"checkpoint_factor": 10, "exit_interval": 50}, [], 0, 5),
        ({"checkpoint_factor": 10}, [10, 20], 20, 8),
        ({"checkpoint_factor": 10, "keep_last_n_checkpoints": 3}, [], 0, 4),
        ({"checkpoint_factor": 10, "keep_last_n_checkpoints": 3}, [10, 20, 30], 30, 1),
        ({"checkpoint_factor": 10, "keep_last_n_checkpoints": 2, "keep_every_n_steps": 50}, [], 0, 2 + 2 + 1),
        ({"checkpoint_factor": 10, "keep_last_n_checkpoints": 5}, [100], 100, 0),
    ],
)
def test_checkpoints_that_a_launch_adds(
    keys: dict[str, Any], saved: list[int], step: int, added: int, tmp_path: Path
) -> None:
    for number in saved:
        native.step_folder(tmp_path, number).mkdir()
        (native.step_folder(tmp_path, number) / native.MANIFEST).write_text("{}")
    assert added_checkpoints(config(train_iters=100, **keys), str(tmp_path), step) == added


def test_checkpoints_of_a_run_without_end_are_counted_at_once(tmp_path: Path) -> None:
    last = 2**31 - 1
    assert added_checkpoints(config(train_iters=last, checkpoint_factor=1), str(tmp_path), 5) == 100_000
    assert added_checkpoints(config(train_iters=last, checkpoint_factor=10**9), str(tmp_path), 5) == 3
    logarithmic = config(train_iters=last, checkpoint_factor=2, checkpoint_scale="log")
    assert added_checkpoints(logarithmic, str(tmp_path), 0) == 32


@pytest.mark.parametrize(("factor", "warned"), [(1, True), (12, False)])
def test_disk_that_will_be_full_is_warned_of(
    factor: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving.dist, "is_main", lambda: True)
    keys = config(save=str(tmp_path), checkpoint_factor=factor)
    free = 2 * checkpoint_bytes(keys)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    warn_of_full_disk(keys, 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == warned
    assert not warned or (f"{tmp_path}: " in warnings[0] and "write 12 checkpoints" in warnings[0])
    assert not warned or "of which 2 fit; free some space" in warnings[0]


def test_checkpoint_size_depends_on_what_is_trained() -> None:
    share = trainable_share(config())
    assert checkpoint_bytes(config()) == share.total * (4 + 12)
    assert checkpoint_bytes(config(precision="bfloat16")) == share.total * (2 + 12)
    frozen = trainable_share(config(**{"optimizer.params.lr": 1e-3}, trainable=["mlp"]))
    assert (
        checkpoint_bytes(config(trainable=["mlp"]))
        == frozen.total * 4 + frozen.trained * 12 + (frozen.total - frozen.trained) * 4
    )
