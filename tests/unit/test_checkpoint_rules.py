"""When a run is saved, where it starts, and what makes a checkpoint another run's."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.config import CheckpointConfig, Config, load_config
from megatron_coca.model import build_model
from megatron_coca.training.checkpoint import (
    Checkpoints,
    exclusive,
    is_due,
    load_initial_weights,
    refuse_other_run,
    starting_point,
)
from megatron_coca.training.corpus import Corpus, open_corpus

LAYOUT = {"world_size": 1, "zero_stage": 0, "batch": 4, "dtype": "fp32"}


def keys(**values: Any) -> CheckpointConfig:
    return CheckpointConfig.model_validate(values)


def due(**values: Any) -> list[int]:
    return [step for step in range(1, 101) if is_due(step, keys(**values))]


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
    ],
)
def test_is_due(values: dict[str, Any], expected: list[int]) -> None:
    assert due(**values) == expected


def checkpoint(root: Path, step: int, config: Config | None = None, meta: dict[str, Any] | None = None) -> Path:
    folder = native.begin(root, step)
    if config is not None:
        (folder / native.CONFIG).write_text(config.to_yaml())
        save_file(build_model(config).state_dict(), folder / native.WEIGHTS)
    native.write_json(folder / native.META, {"step": step, **(meta or {})})
    return native.commit(root, step)


def test_a_fresh_start(tmp_path: Path) -> None:
    new, both = str(tmp_path / "new"), str(tmp_path / "run")
    assert starting_point(keys()) is None
    assert starting_point(keys(save=new)) is None
    assert starting_point(keys(save=new, load=new)) is None, "the first launch of a command that can be repeated"
    (tmp_path / "run").mkdir()
    native.begin(tmp_path / "run", 4)
    assert starting_point(keys(save=both, load=f"{both}/../run")) is None, "an interrupted first save is no checkpoint"


def test_resuming(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    for step in (4, 8):
        checkpoint(tmp_path / "run", step)
    assert starting_point(keys(save=run, load=run)) == tmp_path / "run/global_step8"
    assert starting_point(keys(save=run, load=run, iteration=4)) == tmp_path / "run/global_step4"
    assert starting_point(keys(save=str(tmp_path / "new"), load=run)) == tmp_path / "run/global_step8"
    for values in ({}, {"save": run}):
        assert starting_point(keys(load=f"{run}/global_step4", **values)) == tmp_path / "run/global_step4"


def test_a_start_that_would_mix_runs_is_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    checkpoint(tmp_path / "run", 8)
    for values in ({"save": run}, {"save": run, "load": run, "finetune": True}):
        with pytest.raises(CheckpointError, match="already holds a run, up to step 8; resume it with load="):
            starting_point(keys(**values))
    checkpoint(tmp_path / "other", 3)
    with pytest.raises(CheckpointError, match="run: already holds a run, up to step 8"):
        starting_point(keys(save=run, load=str(tmp_path / "other")))


def test_a_start_that_cannot_be_found_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="elsewhere: no such checkpoint folder"):
        starting_point(keys(load=str(tmp_path / "elsewhere"), save=str(tmp_path / "new")))
    checkpoint(tmp_path / "run", 8)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are \[8\]"):
        starting_point(keys(load=str(tmp_path / "run"), iteration=5))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no optimizer state; set finetune=true"):
        starting_point(keys(load=str(tmp_path / "hf")))


@pytest.fixture(scope="module")
def opened(small: dict[str, Any]) -> Corpus:
    return open_corpus(load_config([], small))


@pytest.fixture
def saved(opened: Corpus, tmp_path: Path) -> Path:
    return checkpoint(tmp_path, 4, opened.config, {"data": opened.identity, **LAYOUT})


def changed(corpus: Corpus, **values: Any) -> Corpus:
    return replace(corpus, config=corpus.config.override(values))


def test_the_same_run_is_accepted(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    refuse_other_run(saved, opened, LAYOUT)
    elsewhere = {"save": "x", "load": "y", "log_interval": 5, "train_iters": 99, "attention_backend": "sdpa"}
    refuse_other_run(saved, changed(opened, **elsewhere), LAYOUT)


def test_what_may_change_is_said(saved: Path, opened: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megatron_coca").setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        refuse_other_run(saved, changed(opened, **{"optimizer.params.lr": 1e-5}), LAYOUT)
    assert "resuming with another optimizer.params.lr (saved 0.003, now 1e-05)" in caplog.text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"num_layers": 3, "hidden_size": 64}, ("num_layers (saved 2, now 3)", "hidden_size (saved 32, now 64)")),
        ({"pos_emb": "rotary"}, ("pos_emb (saved 'coca', now 'rotary')",)),
        ({"seed": 8}, ("seed (saved 7, now 8)",)),
        ({"hidden_dropout": 0.0}, ("hidden_dropout (saved 0.1, now 0.0)",)),
        ({"weight_decay": 0.0}, ("weight_decay (saved 0.1, now 0.0)",)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling (saved None, now ",)),
    ],
)
def test_another_run_is_refused_by_its_keys(
    saved: Path, opened: Corpus, values: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        refuse_other_run(saved, changed(opened, **values), LAYOUT)
    for part in (str(saved), "cannot be resumed with another", "finetune=true", *named):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", LAYOUT)
def test_another_layout_is_refused(saved: Path, opened: Corpus, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} \(saved "):
        refuse_other_run(saved, opened, LAYOUT | {name: "other"})


def test_other_data_is_refused(saved: Path, opened: Corpus, small: dict[str, Any]) -> None:
    other = open_corpus(load_config([], small | {"train_data_paths": small["test_data_paths"]}))
    prefix = small["test_data_paths"][0]
    with pytest.raises(CheckpointError, match=rf"another token count of {prefix} \(saved [\d,]+, now [\d,]+\)"):
        refuse_other_run(saved, other, LAYOUT)


def test_finetuning_takes_the_weights(saved: Path, opened: Corpus) -> None:
    source = build_model(opened.config).state_dict()
    model = build_model(opened.config.override({"seed": 99}))
    assert not torch.equal(model.state_dict()["final_linear.weight"], source["final_linear.weight"])
    load_initial_weights(model, keys(load=str(saved.parent)))
    assert not torch.equal(model.state_dict()["final_linear.weight"], source["final_linear.weight"]), (
        "only with finetune"
    )
    load_initial_weights(model, keys(load=str(saved.parent), finetune=True, iteration=4))
    assert all(torch.equal(tensor, source[name]) for name, tensor in model.state_dict().items())


def test_finetuning_refuses_weights_of_another_shape(saved: Path, opened: Corpus) -> None:
    model = build_model(opened.config.override({"num_layers": 3}))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="missing blocks.2.input_layernorm.weight"):
        load_initial_weights(model, keys(load=str(saved.parent), finetune=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "nothing was copied"


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_coca.training.engine.is_main", lambda: True)
    monkeypatch.setattr("megatron_coca.training.engine.everyone_succeeded", lambda succeeded: succeeded)
    with exclusive(str(tmp_path)), pytest.raises(CheckpointError, match="another run is training into"):  # noqa: SIM117
        with exclusive(str(tmp_path)):
            pass
    with exclusive(str(tmp_path)):
        pass


def test_a_disk_that_fills_up_under_the_weights_leaves_nothing_half_written(
    opened: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    for name, answer in (("is_main", True), ("rank", 0)):
        monkeypatch.setattr(f"megatron_coca.training.engine.{name}", lambda answer=answer: answer)
    monkeypatch.setattr("megatron_coca.training.engine.everyone_succeeded", lambda succeeded: succeeded)
    monkeypatch.setattr("megatron_coca.training.checkpoint.save_file", full)
    corpus = replace(opened, config=opened.config.override({"save": str(tmp_path / "run")}))
    engine = SimpleNamespace(save=lambda folder: folder.mkdir(), weights=lambda: {})
    with pytest.raises(CheckpointError, match="step 3 could not be written .*No space left.*earlier ones are intact"):
        Checkpoints(corpus, engine, LAYOUT).save(3)  # type: ignore[arg-type]
    assert list((tmp_path / "run").iterdir()) == []
