"""The steps after which a run is saved, and the checkpoints that it writes."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.native.state import WEIGHT, ParameterSlice, StatePiece, write_pieces
from megatron_coca.config import CheckpointConfig
from megatron_coca.training.checkpointing.resume import StageStart
from megatron_coca.training.checkpointing.saving import Checkpoints, is_due
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.numerics import changes
from tests.one_rank import changed, context_of_one_rank, only_stage


def keys(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate(values)


def due(**values: Any) -> list[int]:
    return [step for step in range(101) if is_due(step, keys(**values))]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"checkpoint_factor": 40}, [40, 80]),
        ({"checkpoint_factor": 1}, list(range(1, 101))),
        ({"checkpoint_factor": 3, "checkpoint_scale": "log"}, [1, 3, 9, 27, 81]),
        ({"checkpoint_factor": 2, "checkpoint_scale": "log"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"checkpoint_factor": 50, "extra_save_iters": [7, 50]}, [7, 50, 100]),
        ({"extra_save_iters": [7, 3]}, [3, 7]),
        ({"checkpoint_factor": 50.0, "extra_save_iters": [0]}, [0, 50, 100]),
        ({"checkpoint_factor": 1.5, "checkpoint_scale": "log"}, [1, 2, 3, 5, 7, 11, 17, 25, 38, 57, 86]),
    ],
)
def test_is_due(values: dict[str, Any], expected: list[int]) -> None:
    assert due(**values) == expected


@pytest.mark.parametrize("factor", [1.01, 1.3, 2**0.5, 2.0, 7.7, 100])
def test_a_logarithmic_scale_saves_where_gpt_neox_does(factor: float) -> None:
    """GPT-NeoX multiplies a power until it passes the step, and compares the whole part."""
    powers, power = set(), 1.0
    while power < 1e6:
        powers.add(int(power))
        power *= factor
    chosen = keys(checkpoint_factor=factor, checkpoint_scale="log")
    steps = {*range(1, 3000), *powers, *(step + 1 for step in powers)}
    assert {step for step in steps if is_due(step, chosen)} == {step for step in powers if step < 1e6}


def engine_of(weight: torch.Tensor) -> Any:
    """An engine with one parameter and no optimizer."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        pieces=lambda: [StatePiece("w", WEIGHT, 0, weight)],
        parameter_slices=lambda: {"w": ParameterSlice((weight.numel(),))},
        counters=lambda: {"step": 1.0},
        restored=lambda counters: None,
        partitioned=False,
        copies=frozenset(),
    )


def plainly(folder: Path) -> StageStart:
    return StageStart(folder, new_optimizer=False, new_losses=False, adds_norms=False, counters={"step": 1.0})


def checkpoints_of(corpus: Corpus, engine: Any, **values: Any) -> Checkpoints:
    opened = only_stage(changed(corpus, **values))
    return Checkpoints(opened, engine, context_of_one_rank(opened.corpus.config.checkpoint))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("in_background", [True, False])
def test_the_saved_state_is_that_of_the_call(opened: Corpus, tmp_path: Path, in_background: bool) -> None:
    weight = torch.arange(5.0)
    run = checkpoints_of(opened, engine_of(weight), save=str(tmp_path / "run"), async_save=in_background)
    run.save(3, {"skipped": 2})
    weight.fill_(7.0)  # training continues
    run.wait()
    folder = native.locate(tmp_path / "run")
    native.verify(folder)
    assert load_file(folder / native.WEIGHTS)["w"].tolist() == [0, 1, 2, 3, 4]
    assert run.restore(plainly(folder))["progress"]["skipped"] == 2 and weight.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("one_rank")
def test_a_resumed_run_keeps_its_identity(opened: Corpus, tmp_path: Path) -> None:
    def run(name: str) -> Checkpoints:
        return checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / name), async_save=False)

    def identity(name: str, step: int) -> str:
        return str(native.read_json(tmp_path / f"{name}/global_step{step}" / native.META)["run"])

    run("one").save(1, {})
    resumed = run("one")
    resumed.restore(plainly(tmp_path / "one/global_step1"))
    resumed.save(2, {})
    run("two").save(1, {})
    assert identity("one", 1) == identity("one", 2) != identity("two", 1)


@pytest.mark.usefixtures("one_rank")
def test_a_change_that_affects_the_last_bits_is_a_warning(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> Checkpoints:
        return checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"), async_save=False)

    run().save(1, {})
    run().restore(plainly(tmp_path / "run/global_step1"))
    assert "resuming with" not in caplog.text
    monkeypatch.setenv("LD_PRELOAD", "/opt/mkl_avx512.so")
    run().restore(plainly(tmp_path / "run/global_step1"))
    assert "resuming with" in caplog.text and "LD_PRELOAD (saved '', now 'mkl_avx512.so')" in caplog.text
    assert changes({"torch": "2.12.0"}, {"torch": "2.13.0", "device": "new"}) == [
        "torch (saved '2.12.0', now '2.13.0')"
    ]


@pytest.mark.usefixtures("one_rank")
def test_checkpoints_are_kept_by_the_keys(opened: Corpus, tmp_path: Path) -> None:
    keep = {"keep_last_n_checkpoints": 2, "keep_every_n_steps": 4}
    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"), **keep)
    for step in range(1, 8):
        run.save(step, {})
    run.wait()
    assert native.steps(tmp_path / "run") == [4, 6, 7]


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_fills_up_under_the_random_state_is_named(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = native.begin

    def begin_on_a_full_disk(save: Path, step: int) -> Path:
        folder = begin(save, step)
        (folder / native.RNG).mkdir()
        (folder / native.RNG / "rank_0.pt").symlink_to("/dev/full")
        return folder

    monkeypatch.setattr(native, "begin", begin_on_a_full_disk)
    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"))
    run.save(1, {})
    with pytest.raises(CheckpointError, match="step 1 cannot be written .*No space left"):
        run.wait()


@pytest.mark.usefixtures("one_rank")
def test_a_disk_that_fills_up_under_the_weights_leaves_nothing_half_written(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "run"))
    run.save(2, {})
    run.wait()
    monkeypatch.setattr("megatron_coca.training.checkpointing.saving.write_safetensors", full)
    run.save(3, {})
    with pytest.raises(CheckpointError, match="step 3 cannot be written .*No space.*are intact"):
        run.wait()
    assert not run.failed, "the error is raised once"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"global_step2", native.LATEST}


@pytest.mark.usefixtures("one_rank")
def test_weights_are_put_together_without_reading_the_state_again(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def destroyed(path: Path, *arguments: Any) -> None:
        write_pieces(path, *arguments)
        path.write_bytes(b"lost")

    monkeypatch.setattr("megatron_coca.training.checkpointing.saving.write_pieces", destroyed)
    run = checkpoints_of(opened, engine_of(torch.arange(5.0)), save=str(tmp_path))
    run.save(2, {})
    run.wait()
    folder = native.locate(tmp_path)
    assert load_file(folder / native.WEIGHTS)["w"].tolist() == [0, 1, 2, 3, 4]
    native.verify(folder)


@pytest.mark.usefixtures("one_rank")
def test_a_copied_run_has_an_id_of_its_own(opened: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder that was moved or linked stays the same run. Of a folder and its copy, the one at the old path does."""

    def resumed(name: str, load: str | None = None) -> Checkpoints:
        run = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / name))
        run.restore(plainly(native.locate(tmp_path / (load or name))))
        return run

    first = checkpoints_of(opened, engine_of(torch.zeros(5)), save=str(tmp_path / "first"))
    first.save(1, {})
    first.wait()
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    (tmp_path / "linked").symlink_to(tmp_path / "first")
    assert resumed("first").run == resumed("linked").run == first.run
    copy = resumed("copy")
    assert copy.run != first.run and caplog.text.count("continues a copy of the run in") == 1
    copy.save(2, {})
    copy.wait()
    assert resumed("copy").run == copy.run and caplog.text.count("continues a copy of the run in") == 1
    assert resumed("branch", load="first").run != first.run, "another save folder is another run"
    (tmp_path / "copy").rename(tmp_path / "moved")
    assert resumed("moved").run == copy.run
    (tmp_path / "first").rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "first")
    assert resumed("first").run == first.run != resumed("old").run
