"""Mixtures of experts in the engine: what a step's routers did, the update of balancing, and resumed steps."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import build_model
from megatron_coca.model.experts import StepRouting, mixtures_of
from megatron_coca.training.engine import NativeEngine, build_engine
from megatron_coca.training.engine.routing import routing_figures
from megatron_coca.training.monitoring.loss_guard import Limits
from tests.checkpoint_files import run_alone

KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 64}
KEYS |= {"pos_emb": "coca", "engine": "native", "optimizer.params.lr": 1e-2, "train_micro_batch_size_per_gpu": 2}
KEYS |= {"gradient_accumulation_steps": 2, "moe_num_experts": 4, "moe_top_k": 2, "precision": "bfloat16"}
KEYS |= {"mlp_config": ["dense", "experts"], "moe_correction_bias": True, "moe_bias_update_rate": 1e-3}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    run_alone(monkeypatch)


def engine_of(seed: int = 0) -> NativeEngine:
    config = load_config([], KEYS | {"seed": seed})
    model = build_model(config).train()
    engine = build_engine(model, config, config.batch.resolve(1))
    assert isinstance(engine, NativeEngine)
    return engine


def batches(step: int) -> list[Batch]:
    return list(Batch(np.random.default_rng(step).integers(8, size=(4, 9))).split(2))


def correction(engine: NativeEngine) -> torch.Tensor:
    (mixture,) = mixtures_of(engine._module)
    assert mixture.router.correction_bias is not None
    return mixture.router.correction_bias


def test_a_step_counts_all_micro_batches_and_updates_the_correction() -> None:
    engine = engine_of()
    routing = engine.train_step(batches(0), 1e-2).routing
    assert routing is not None and routing.load.tolist() and int(routing.load.sum()) == 4 * 8 * 2
    expected = 1e-3 * (16 - routing.load[0].double()).sign()
    assert correction(engine).dtype == torch.float32
    torch.testing.assert_close(correction(engine), expected.float())
    before = correction(engine).clone()
    skipped = engine.train_step(batches(1), 1e-2, Limits(loss=0.0))
    assert skipped.skipped and skipped.routing is not None and torch.equal(correction(engine), before)
    engine.mean_loss(batches(2))
    assert torch.equal(correction(engine), before), "held-out samples do not count"


def test_a_resumed_engine_routes_and_trains_the_same() -> None:
    engine = engine_of()
    for step in range(3):
        engine.train_step(batches(step), 1e-2)
    saved, counters = {each[:3]: each.tensor.clone() for each in engine.pieces()}, engine.counters()
    assert any("correction_bias" in name for name, _, _ in saved)
    whole = [engine.train_step(batches(step), 1e-2) for step in (3, 4)]
    other = engine_of(seed=1)
    for piece in other.pieces():
        piece.tensor.copy_(saved[piece[:3]])
    other.restored(counters)
    for step, expected in zip((3, 4), whole, strict=True):
        found = other.train_step(batches(step), 1e-2)
        assert found[:4] == expected[:4] and found.routing is not None and expected.routing is not None
        assert all(torch.equal(one, two) for one, two in zip(found.routing, expected.routing, strict=True))
    assert torch.equal(correction(other), correction(engine))


def test_metrics_name_the_layer() -> None:
    load = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0]])
    routing = StepRouting(load, torch.tensor([1.0, 4.0]).double(), torch.tensor([2.0, 3.0]).double())
    assert routing_figures(routing, [1, 3]) == {
        "moe_loss": 2.5,
        "moe_z_loss": 2.5,
        "moe_largest_load/layer_1": 1.0,
        "moe_unused_experts/layer_1": 0,
        "moe_largest_load/layer_3": 4.0,
        "moe_unused_experts/layer_3": 3,
    }
    assert routing_figures(None, []) == {}
