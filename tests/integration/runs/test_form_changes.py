"""A run that drops its positions (DroPE) equals a run built by hand, with any ranks and any interruption."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_coca import load_model
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.exporting import export
from megatron_coca.checkpoints.native.state import StateReader
from megatron_coca.config import Config, load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training.corpus import open_loader
from megatron_coca.training.opened_stages import OpenedStage, open_stages
from megatron_coca.training.topology import Topology
from tests.integration.hooks import Hook

DROP, STEPS = 8, 12
PLAIN = {"pos_emb": "rotary", "rotary_pct": 1.0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
FORM = {"pos_emb": "none", "qk_norm": "head"}
STAGES = {"stages": [{"until": DROP}, FORM]}
WHOLE = {"train_micro_batch_size_per_gpu": 4}
"""One micro-batch in a step, so that the run by hand need not add gradients up."""
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def optimizer_of(model: torch.nn.Module, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and "norm" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.dim() < 2 or "norm" in name]
    groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": others}]
    betas, eps = config.optimizer.betas, config.optimizer.eps
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=eps, weight_decay=0.0, fused=True)


def train_by_hand(
    opened: OpenedStage, model: torch.nn.Module, optimizer: torch.optim.AdamW, losses: list[float]
) -> None:
    """Train one stage in plain PyTorch."""
    stage, sizes = opened.stage, opened.sizes
    loss_of, parameters = LanguageModelLoss(model), list(model.parameters())
    with open_loader(opened.corpus, opened.corpus.train, (sizes.total, sizes.micro, 0, 1)) as loader:
        for step in range(stage.first, stage.last):
            (batch,) = loader.micro_batches(step)
            loss = loss_of(torch.from_numpy(batch.tokens))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, stage.config.optimizer.gradient_clipping)
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate(step)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def test_a_run_that_drops_positions_equals_one_by_hand(
    live: Any, open_run: Any, small: dict[str, Any], tmp_path: Path
) -> None:
    keys = small | PLAIN | WHOLE | STAGES
    live(keys | {"save": str(tmp_path / "run")})
    run, losses = open_run(tmp_path / "run"), list[float]()

    first, second = open_stages(load_config([], keys), Topology(1, 1, 1, 1))
    rotary = build_model(first.corpus.config)
    states = optimizer_of(rotary, first.stage.config)
    train_by_hand(first, rotary, states, losses)

    dropped = build_model(second.corpus.config)
    missing, unexpected = dropped.load_state_dict(rotary.state_dict(), strict=False)
    names = [f"blocks.{n}.attention.{name}_layernorm.weight" for n in range(2) for name in ("query", "key")]
    assert not unexpected and sorted(missing) == sorted(names), "the rest of the weights is shared"
    assert all(bool((dropped.state_dict()[name] == 1).all()) for name in names)
    carried, old = optimizer_of(dropped, second.stage.config), dict(rotary.named_parameters())
    for name, weight in dropped.named_parameters():
        if name in old:
            carried.state[weight] = dict(states.state[old[name]])
    train_by_hand(second, dropped, carried, losses)

    assert run.losses == losses and len(set(losses)) == STEPS
    saved = load_file(tmp_path / "run" / f"global_step{STEPS}" / native.WEIGHTS)
    assert all(torch.equal(saved[name], weight) for name, weight in dropped.named_parameters())
    assert not torch.equal(saved[names[0]], torch.ones(16)), "the added norms are trained"
    folder = tmp_path / "run" / f"global_step{STEPS}"
    with StateReader(folder / native.STATE, native.state_files(folder)) as reader:
        for name, weight in dropped.named_parameters():
            for kind in KINDS[1:]:
                assert torch.equal(reader.whole(name, kind), carried.state[weight][kind]), (name, kind)
    counters = native.read_meta(folder)["counters"]
    assert {float(state["step"]) for state in carried.state.values()} == {float(STEPS), float(STEPS - DROP)}
    assert (counters["step"], counters["added_at"]) == (STEPS, DROP)


def layout(name: str, ranks: int, stops: Sequence[int], **changes: Any) -> Any:
    return pytest.param(ranks, stops, changes, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stops", "changes"),
    [
        layout("one process", 1, (8, 10)),
        layout("ZeRO 1, bf16", 2, (8, 10), precision="bfloat16", zero_stage=1),
        layout("ZeRO 2", 2, (7, 9), zero_stage=2),
        layout("ZeRO 3", 2, (8, 9), zero_stage=3),
        layout("pipeline stages", 2, (8, 10), pipe_parallel_size=2),
        layout("tensor parallelism", 2, (7, 10), model_parallel_size=2),
        layout("sequence parallelism", 2, (8, 10), sequence_parallel_size=2),
    ],
)
def test_stopping_and_killing_after_the_drop_changes_no_bit(
    live: Any,
    open_run: Any,
    assert_same_state: Any,
    tmp_path: Path,
    ranks: int,
    stops: Sequence[int],
    changes: dict[str, Any],
) -> None:
    keys = PLAIN | STAGES | changes | {"auto_resume": True, "checkpoint_factor": 1, "async_save": False}
    live(keys | {"save": str(tmp_path / "whole")}, ranks=ranks)
    stopped = keys | {"save": str(tmp_path / "stopped")}
    for stop in stops:
        live(stopped | {"exit_interval": stop}, ranks=ranks)
    live(stopped, [Hook("step", "kill", (2,))], ranks=ranks, expected=None)
    assert native.steps(tmp_path / "stopped")[-1] == stops[-1] + 1
    live(stopped, ranks=ranks)
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "stopped")
    assert whole.losses == run.losses and whole.weights(STEPS) == run.weights(STEPS)
    assert_same_state(whole.state(STEPS), run.state(STEPS))
    assert native.read_meta(tmp_path / f"stopped/global_step{STEPS}")["counters"]["added_at"] == DROP


@pytest.mark.slow
def test_norms_with_a_new_optimizer_count_like_all_weights(live: Any, open_run: Any, tmp_path: Path) -> None:
    keys = PLAIN | {"stages": [{"until": DROP}, FORM | {"reset_optimizer": True}], "auto_resume": True}
    live(keys | {"save": str(tmp_path / "whole")})
    for stop in (DROP, 10, STEPS):
        live(keys | {"save": str(tmp_path / "stopped"), "exit_interval": stop})
    whole, run = open_run(tmp_path / "whole"), open_run(tmp_path / "stopped")
    assert whole.losses == run.losses and whole.weights(STEPS) == run.weights(STEPS)
    assert native.read_meta(tmp_path / f"stopped/global_step{STEPS}")["counters"] == {"step": STEPS - DROP}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        pytest.param(2, {"zero_stage": 1}, id="ZeRO 1"),
        pytest.param(2, {"zero_stage": 2}, id="ZeRO 2"),
        pytest.param(2, {"zero_stage": 3}, id="ZeRO 3"),
        pytest.param(2, {"pipe_parallel_size": 2, "train_micro_batch_size_per_gpu": 2}, id="pipeline stages"),
        pytest.param(2, {"model_parallel_size": 2}, id="tensor parallelism"),
        pytest.param(2, {"sequence_parallel_size": 2}, id="sequence parallelism"),
    ],
)
def test_a_divided_run_drops_positions_like_one_process(
    live: Any, open_run: Any, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """The added norms have their own step count in every layout: Adam's first steps would differ by factors."""
    live(PLAIN | STAGES | {"save": str(tmp_path / "one")})
    live(PLAIN | STAGES | changes | {"save": str(tmp_path / "many")}, ranks=ranks)
    one, many = open_run(tmp_path / "one"), open_run(tmp_path / "many")
    assert many.losses == pytest.approx(one.losses, rel=1e-5)
    weights = [load_file(run.folder / f"global_step{STEPS}" / native.WEIGHTS) for run in (one, many)]
    for name in weights[0]:
        if "query_layernorm" in name or "key_layernorm" in name:
            torch.testing.assert_close(weights[1][name], weights[0][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_loaded_run_may_change_its_form(
    live: Any, open_run: Any, assert_same_state: Any, small: dict[str, Any], tmp_path: Path
) -> None:
    """`load` into another folder does what a stage does; the run's own checkpoints stay those of its form."""
    live(PLAIN | STAGES | {"save": str(tmp_path / "staged")})
    live(PLAIN | {"save": str(tmp_path / "rotary"), "exit_interval": DROP})
    loaded = PLAIN | FORM | {"load": str(tmp_path / "rotary"), "save": str(tmp_path / "run"), "auto_resume": True}
    began = live(loaded | {"exit_interval": 10})
    assert "different pos_emb (saved 'rotary', now 'none')" in began.output
    live(loaded)
    staged, run = open_run(tmp_path / "staged"), open_run(tmp_path / "run")
    assert run.losses == staged.losses[DROP:] and run.weights(STEPS) == staged.weights(STEPS)
    assert_same_state(run.state(STEPS), staged.state(STEPS))

    def refused(changes: Mapping[str, Any], *parts: str) -> None:
        output = " ".join(live(PLAIN | dict(changes), expected=2).output.split())
        assert all(part in output for part in parts), output

    other = {"load": str(tmp_path / "rotary"), "save": str(tmp_path / "other")}
    refused(other | {"pos_emb": "rpe"}, "pos_emb (rotary becomes rpe, ", "finetune")
    refused(other | {"rotary_emb_base": 500}, "rotary_emb_base (saved 10000.0, now 500.0)")
    own = {"load": str(tmp_path / "rotary"), "save": str(tmp_path / "rotary"), "pos_emb": "none"}
    refused(own, "pos_emb (saved 'rotary', now 'none')", "in a new stage")
    refused(
        {"load": str(tmp_path / "run"), "save": str(tmp_path / "other")},
        "can only be added",
        "qk_norm head becomes none)",
    )
    export(tmp_path / "run" / f"global_step{STEPS}", tmp_path / "exported")
    tokens = torch.arange(48)[None] + 97
    models = [load_model(tmp_path / name)(tokens) for name in ("run", "exported")]
    assert torch.equal(*models), "the export is that of a model without positions and with the norms"
