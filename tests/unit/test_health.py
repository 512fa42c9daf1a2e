"""The health check at the start of a run: measurements and warnings."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.checkpoints import native
from megatron_coca.config import Config, load_config
from megatron_coca.training import health
from megatron_coca.training.health import (
    MIN_JUDGED_BYTES,
    Bandwidth,
    Disk,
    Health,
    added_checkpoints,
    check_health,
    measure,
)
from megatron_coca.training.saving import due_steps, is_due
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


GOOD = Health(
    (Disk("runs", 100 * MIB, 10 * MIB, 10),), Bandwidth(64 * MIB, 1e9), Bandwidth(32 * MIB, 1e9), MIB, 0.1, ("a", "b")
)


@pytest.mark.parametrize(
    ("changes", "keys", "warning"),
    [
        ({}, {}, None),
        (
            {"disks": (Disk("runs", 100 * MIB, 30 * MIB, 10),)},
            {},
            "runs: 100 MiB free, but this run will write 10 checkpoints of about 30 MiB (300 MiB), of which 3 fit;",
        ),
        (
            {"disks": (*GOOD.disks, Disk("copy", 0, MIB, 1))},
            {},
            "copy: 0 KiB free, but this run will write 1 checkpoints",
        ),
        (
            {"writing": Bandwidth(64 * MIB, 20e6)},
            {},
            "runs: written at 19.1 MiB/s, so a checkpoint of 10 MiB takes about 1 s",
        ),
        ({"writing": Bandwidth(64 * MIB, 20e6)}, {"health_min_disk_speed": 10}, None),
        ({"writing": Bandwidth(64 * MIB, 20e6)}, {"health_min_disk_speed": 0}, None),
        ({"writing": Bandwidth(MIN_JUDGED_BYTES - 1, 1e3)}, {}, None),
        (
            {"reducing": Bandwidth(32 * MIB, 1e7)},
            {},
            "all-reduce runs at 0.01 GB/s, so reducing the gradients of a step (1 MiB)",
        ),
        ({"reducing": Bandwidth(32 * MIB, 1e7)}, {"health_min_bandwidth": 0.001}, None),
        ({"reducing": Bandwidth(MIN_JUDGED_BYTES - 1, 1e3)}, {}, None),
        ({"reducing": None, "writing": None, "skew": None, "clocks": None}, {}, None),
        ({"skew": 90.0}, {}, "the clocks of a and b differ by 90.0 s; synchronise them"),
        ({"skew": 90.0}, {"health_max_clock_skew": 100.0}, None),
    ],
)
def test_warnings(changes: dict[str, Any], keys: dict[str, Any], warning: str | None) -> None:
    lines = GOOD._replace(**changes).problems(config(**keys))
    assert len(lines) == (warning is not None)
    assert warning is None or lines[0].startswith(warning), lines


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, without a process group."""
    answers = {"is_main": True, "rank": 0, "world_size": 1, "host_name": "a"}
    fake = {name: lambda answer=answer: answer for name, answer in answers.items()}
    texts = {"gather_texts": lambda text: [text], "gather_floats": lambda values: [values]}
    monkeypatch.setattr(health, "dist", SimpleNamespace(**fake, **texts))


def test_disk_is_measured_without_leftovers(alone: None, tmp_path: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    keys = {"save": str(tmp_path), "checkpoint_factor": 4}
    found = measure(config(**keys), 0)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert not list(tmp_path.iterdir())
    size = health.checkpoint_bytes(config(**keys))
    assert found.writing is not None and found.writing.measured == size and found.writing.rate > 0
    assert found.disks[0].added == 3 and found.disks[0].checkpoint == size
    assert found.reducing is None and found.skew is None
    assert found.figures().keys() == {
        f"health/{name}" for name in ("disk_mb_per_second", "disk_free_gib", "checkpoint_gib")
    }


def test_disk_that_will_be_full_is_warned_of(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * MIB))
    check_health(config(save=str(tmp_path), checkpoint_factor=1), 0)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        len(warnings) == 1
        and "this run will write 12 checkpoints of about" in warnings[0]
        and "of which 2 fit" in warnings[0]
    )


def test_unwritable_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert health._write(str(tmp_path / "absent"), MIB)[0] == 0
    assert "absent: 1048576 bytes could not be written" in caplog.text


def test_clocks_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late out of one barrier is not late in all three."""
    rounds = iter([[[0.0], [0.1], [90.7]], [[1.0], [1.0], [91.0]], [[2.0], [4.0], [93.0]]])
    fake = SimpleNamespace(barrier=lambda: None, gather_floats=lambda values: next(rounds))
    monkeypatch.setattr(health, "dist", fake)
    assert health._clock_skew(["a", "a", "b"]) == (90.0, ("a", "b"))


def test_checkpoint_size_depends_on_what_is_trained() -> None:
    share = health.trainable_share(config())
    assert health.checkpoint_bytes(config()) == share.total * (4 + 12)
    assert health.checkpoint_bytes(config(precision="bfloat16")) == share.total * (2 + 12)
    frozen = health.trainable_share(config(**{"optimizer.params.lr": 1e-3}, trainable=["mlp"]))
    assert (
        health.checkpoint_bytes(config(trainable=["mlp"]))
        == frozen.total * 4 + frozen.trained * 12 + (frozen.total - frozen.trained) * 4
    )
