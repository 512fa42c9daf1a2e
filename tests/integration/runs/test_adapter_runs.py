"""Runs that train low-rank adapters: exact resume in every division, kills, stages, and the model that they change."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_coca.checkpoints import native, open_checkpoint
from megatron_coca.config import load_config
from tests.conftest import Run
from tests.integration.killing import ForkServer, assert_kills_change_nothing

STEPS = 12
LORA = {"rank": 4, "alpha": 8, "also": ["norms"]}
KEYS = {"lora": LORA, "train_iters": STEPS, "auto_resume": True, "finetune": True}


def on(whole: Run, **keys: Any) -> dict[str, Any]:
    return KEYS | {"load": str(whole.folder)} | keys


def layout(name: str, ranks: int, stops: Sequence[int], slow: bool = True, **changes: Any) -> Any:
    return pytest.param(ranks, stops, changes, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("ranks", "stops", "changes"),
    [
        layout("one process", 1, (3, 8), slow=False, lora=LORA | {"dropout": 0.1}),
        layout("native engine, bf16", 1, (5,), engine="native", precision="bfloat16"),
        layout("native engine", 1, (4,), engine="native"),
        layout("ZeRO 0", 2, (4,), zero_stage=0),
        layout("ZeRO 1, fp32 sums of bf16", 2, (4, 9), precision="bfloat16", zero_stage=1),
        layout("ZeRO 2", 2, (4, 9), zero_stage=2, train_batch_size=16, train_micro_batch_size_per_gpu=2),
        layout("ZeRO 2, offload", 1, (4,), zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        layout("native engine, bf16, in two processes", 2, (4, 9), engine="native", precision="bfloat16"),
        layout("sequence parallelism", 2, (4, 9), sequence_parallel_size=2, attention_dropout=0.0),
        layout("a ring", 2, (4, 9), context_parallel_size=2, attention_dropout=0.0, zero_stage=2),
        layout("DoRA, all matrices", 1, (4,), lora={"rank": 4, "dora": True, "targets": ["query", "value", "mlp"]}),
        layout("rsLoRA, keys as a whole", 1, (4,), lora={"rslora": True, "targets": ["query"], "also": ["key"]}),
        layout("Lion, recomputed blocks", 1, (4,), checkpoint_activations=True, **{"optimizer.type": "lion"}),
    ],
)
def test_stopping_changes_no_bit(
    live: Any,
    whole: Run,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
    ranks: int,
    stops: Sequence[int],
    changes: dict[str, Any],
) -> None:
    keys = on(whole, **changes)
    live(keys | {"save": str(tmp_path / "whole")}, ranks=ranks)
    for stop in (*stops, STEPS):
        live(keys | {"save": str(tmp_path / "stopped"), "exit_interval": stop}, ranks=ranks)
    expected, stopped = open_run(tmp_path / "whole"), open_run(tmp_path / "stopped")
    assert len(expected.losses) == STEPS == len(set(expected.losses))
    assert expected.records == stopped.records and expected.weights(STEPS) == stopped.weights(STEPS)
    assert_same_state(expected.state(STEPS), stopped.state(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 2)])
def test_experts_and_routers_beside_adapters(
    ranks: int, stage: int, live: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """Trained as a whole, they are in the checkpoint. Others keep their bits."""
    experts = {"moe_num_experts": 4, "moe_expert_interval": 2, "moe_correction_bias": True}
    live(experts | {"save": str(tmp_path / "base"), "train_iters": 2, "moe_bias_update_rate": 1e-3})
    for also in (["router"], ["mlp", "router", "norms"]):
        keys = KEYS | experts | {"load": str(tmp_path / "base"), "lora": LORA | {"also": also}, "zero_stage": stage}
        name = "_".join(also)
        live(keys | {"save": str(tmp_path / name), "exit_interval": 4}, ranks=ranks)
        live(keys | {"save": str(tmp_path / name)}, ranks=ranks)
        live(keys | {"save": str(tmp_path / f"{name}_whole")}, ranks=ranks)
        expected, stopped = open_run(tmp_path / f"{name}_whole"), open_run(tmp_path / name)
        assert expected.records == stopped.records and expected.weights(STEPS) == stopped.weights(STEPS)
        assert_same_state(expected.state(STEPS), stopped.state(STEPS))
        before, merged = (dict(open_checkpoint(tmp_path / each).weights()) for each in ("base", name))
        changed = {each for each in before if not torch.equal(before[each], merged[each])}
        assert not any("correction_bias" in each for each in changed)
        whole = {each for each in changed if ".mlp." in each}
        of_parts = {each for each in before if ".mlp." in each and (".router." in each or "mlp" in also)}
        assert whole == {each for each in of_parts if not each.endswith("correction_bias")}


@pytest.mark.slow
def test_every_division_trains_the_same_adapters(live: Any, whole: Run, open_run: Any, tmp_path: Path) -> None:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    runs: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "native": (1, {"engine": "native"}),
        "zero 0": (2, {"zero_stage": 0}),
        "zero 1": (2, {"zero_stage": 1}),
        "zero 2": (2, {"zero_stage": 2}),
        "native, two": (2, {"engine": "native"}),
        "sequence": (2, {"sequence_parallel_size": 2}),
        "ring": (2, {"context_parallel_size": 2}),
    }
    for name, (ranks, changes) in runs.items():
        live(on(whole, save=str(tmp_path / name), **plain, **changes), ranks=ranks)
    losses = {name: open_run(tmp_path / name).losses for name in runs}
    found = {name: load_file(tmp_path / name / f"global_step{STEPS}" / native.WEIGHTS) for name in runs}
    for name in runs:
        assert losses[name] == pytest.approx(losses["one"], rel=1e-5)
        for weight, value in found["one"].items():
            torch.testing.assert_close(found[name][weight], value, rtol=0, atol=1e-4)
    live(on(whole, save=str(tmp_path / "moved"), exit_interval=5, **plain, zero_stage=2), ranks=2)
    live(on(whole, save=str(tmp_path / "moved"), **plain, engine="native"))
    assert open_run(tmp_path / "moved").losses == pytest.approx(losses["one"], rel=1e-5), "from two ranks to one"


def test_a_checkpoint_has_only_what_was_trained(live: Any, whole: Run, tmp_path: Path) -> None:
    """The frozen weights keep their bits; the merged model is the one whose loss was reported."""
    live(on(whole, save=str(tmp_path / "run"), exit_interval=4, checkpoint_factor=4))
    folder = tmp_path / "run" / "global_step4"
    own = load_file(folder / native.WEIGHTS)
    assert own and all(".lora_" in name or "norm." in name for name in own)
    state = load_file(folder / native.STATE / "rank_00000.safetensors")
    assert {name.split(":")[1] for name in state} == own.keys()
    named = native.read_meta(folder)["adapts"]
    first = open_checkpoint(whole.folder)
    assert named["identity"] == first.identity and Path(named["place"]) == first.folder
    before, merged = dict(first.weights()), dict(open_checkpoint(folder).weights())
    adapted = ("query_key_value.weight", "attention.dense.weight")
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert before.keys() == merged.keys()
    assert changed == {name for name in before if name.endswith(adapted) or "norm." in name}
    assert open_checkpoint(folder).identity not in (first.identity, open_checkpoint(whole.folder).identity)


@pytest.mark.slow
def test_the_model_may_move_but_must_be_the_same(live: Any, whole: Run, open_run: Any, tmp_path: Path) -> None:
    first, moved, other = tmp_path / "first", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(whole.folder, first)
    keys = on(whole, load=str(first), save=str(tmp_path / "run"))
    live(keys | {"exit_interval": 3})
    first.rename(moved)
    refused = live(keys, expected=2)
    assert re.search("no longer exists .*--base FOLDER", refused.output)
    live({"save": str(other), "seed": 77, "train_iters": 1})
    refused = live(keys | {"load": str(other)}, expected=2)
    assert f"{other}: is not the model that the adapters in " in refused.output
    live(keys | {"load": str(moved), "exit_interval": 6})
    live(keys | {"base_model": str(moved)})
    live(on(whole, save=str(tmp_path / "still")))
    assert open_run(tmp_path / "run").losses == open_run(tmp_path / "still").losses
    with pytest.raises(native.read.CheckpointError, match="no longer exists"):
        open_checkpoint(tmp_path / "run", step=3)
    found = open_checkpoint(tmp_path / "run", step=3, overrides={"base_model": str(moved)})
    assert found.weights().entries.keys() == open_checkpoint(moved).weights().entries.keys()


T_FIRST = [
    {"until": 4, "trainable": ["key"]},
    {"until": 8, "lora": LORA, "reset_optimizer": True, "restart_schedule": True},
    {"lora": LORA, "seq_length": 64},
]


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(1, {}, id="one process", marks=pytest.mark.slow),
        pytest.param(1, {"engine": "native", "precision": "bfloat16"}, id="native, bf16", marks=pytest.mark.slow),
        pytest.param(2, {"zero_stage": 2}, id="ZeRO 2", marks=pytest.mark.slow),
    ],
)
def test_adapters_begin_in_a_stage(
    ranks: int, changes: dict[str, Any], live: Any, open_run: Any, assert_same_state: Any, tmp_path: Path
) -> None:
    """CoCA's T stage, then adapters, then longer samples. The checkpoint that the adapters change is never removed."""
    keys = {"stages": T_FIRST, "train_iters": STEPS, "auto_resume": True, "keep_last_n_checkpoints": 1} | changes
    live(keys | {"save": str(tmp_path / "whole")}, ranks=ranks)
    for stop in (4, 6, 8, 9, STEPS):
        live(keys | {"save": str(tmp_path / "run"), "exit_interval": stop}, ranks=ranks)
    expected, run = open_run(tmp_path / "whole"), open_run(tmp_path / "run")
    assert expected.records == run.records and expected.weights(STEPS) == run.weights(STEPS)
    assert_same_state(expected.state(STEPS), run.state(STEPS))
    assert native.steps(tmp_path / "run") == [4, STEPS]
    adapts = native.read_meta(tmp_path / "run" / f"global_step{STEPS}")["adapts"]
    assert adapts["place"] == "global_step4"
    (tmp_path / "run").rename(tmp_path / "renamed")
    assert open_checkpoint(tmp_path / "renamed").load().step == STEPS
    further = {"load": str(tmp_path / "renamed"), "save": str(tmp_path / "further"), "finetune": True}
    live(further | {"train_iters": 1, "pos_emb": "coca"})


@pytest.mark.slow
def test_errors_come_before_training(live: Any, whole: Run, tmp_path: Path) -> None:
    refused = live({"lora": LORA, "save": str(tmp_path / "none")}, expected=2)
    assert "lora: needs a model to change; set finetune=true" in refused.output
    refused = live(on(whole, pos_emb="kerple_log", save=str(tmp_path / "none")), expected=2)
    assert "add positions to lora.also" in refused.output
    stages = [{"until": 4, "lora": LORA, "trainable": None}, {"lora": None, "reset_optimizer": True}]
    refused = live({"stages": stages, "save": str(tmp_path / "none")}, expected=2)
    assert "stages[1].lora: the previous stage has adapters" in refused.output
    refused = live({"stages": [{"until": 4}, {"lora": LORA}], "save": str(tmp_path / "none")}, expected=2)
    assert "stages[1].lora: the previous stage has no adapters" in refused.output
    live(on(whole, save=str(tmp_path / "run"), exit_interval=3))
    for changed in (LORA | {"alpha": 9}, LORA | {"also": []}, None):
        refused = live(on(whole, save=str(tmp_path / "run"), lora=changed), expected=2)
        assert "cannot be resumed with a different lora (saved " in refused.output
    keys = {"load": str(tmp_path / "run"), "save": str(tmp_path / "more"), "no_load_optim": True, "finetune": False}
    refused = live(on(whole, **keys, lora=LORA | {"alpha": 9}), expected=2)
    assert "cannot be resumed with a different lora (saved " in refused.output
    live(on(whole, **keys) | {"train_iters": 5})
    assert load_config(tmp_path / "more" / "global_step5" / "config.yml").optimizer.lora is not None


@pytest.mark.parametrize(
    ("ranks", "keys", "share"),
    [
        pytest.param(1, {}, None, id="3", marks=pytest.mark.slow),
        pytest.param(1, {}, 2, id="many", marks=pytest.mark.slow),
        pytest.param(1, {"engine": "native", "precision": "bfloat16"}, 4, id="many, native", marks=pytest.mark.slow),
        pytest.param(2, {"zero_stage": 2}, 4, id="many, ZeRO 2 in two processes", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_as_one_never_killed(
    ranks: int,
    keys: dict[str, Any],
    share: int | None,
    server: ForkServer,
    tmp_path: Path,
    open_run: Any,
    pytestconfig: pytest.Config,
) -> None:
    """The stages of `T_FIRST`: kills also at the border where the adapters begin."""
    kills = 3 if share is None else pytestconfig.getoption("--kills") // share
    staged = {"stages": T_FIRST, "train_iters": STEPS, "auto_resume": True, "checkpoint_factor": 2}

    def start(changes: Any) -> Any:
        return server.start(staged | {"keep_last_n_checkpoints": 2} | keys | dict(changes), ranks)

    assert_kills_change_nothing(start, tmp_path, kills, open_run, STEPS)
