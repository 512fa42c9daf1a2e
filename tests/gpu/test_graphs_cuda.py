"""Steps of micro-batches captured as CUDA graphs against ordinary ones. Run with: python -m pytest -m gpu"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_coca.config import Config, load_config
from megatron_coca.data import Batch
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.training import launch
from megatron_coca.training.engine import Engine, group
from megatron_coca.training.optimizer import build_optimizer
from megatron_coca.training.saving import seed_everything

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KEYS = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 128,
    "vocab_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-3,
    "precision": "bfloat16",
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"pos_emb": name} for name in ("coca", "rotary", "alibi", "xpos", "kerple_log")},
    "rerope": {"pos_emb": "coca", "relative_positions": {"type": "rerope", "window": 32}},
    "uncompiled": {"pos_emb": "coca", "torch_compile": False},
    "dropout": {"pos_emb": "rotary", "hidden_dropout": 0.2, "attention_dropout": 0.2},
    "recomputed": {"pos_emb": "coca", "checkpoint_activations": True},
    "float32 without ZeRO": {"pos_emb": "coca", "precision": "fp32"},
    "fp16": {"pos_emb": "coca", "precision": "fp16"},
}
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
"""Flash attention adds gradients of queries in any order, so equal steps differ in the last bits of bfloat16."""


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    launch.complete_environment(os.environ)
    group.init_distributed()
    yield
    group.shut_down()


def steps(config: Config) -> tuple[list[tuple[float, float | None]], torch.Tensor, Engine]:
    """Losses and gradient norms of four steps, with a validation at another length between them; random state after."""
    seed_everything(config.seed, 0)
    model = build_model(config, "cuda").train()
    sizes = config.batch.resolve(1)
    engine = Engine(LanguageModelLoss(model), build_optimizer(model, config.optimizer), config, sizes)
    generator, results = np.random.default_rng(0), []
    for _ in range(4):
        tokens = generator.integers(512, size=(sizes.accumulation, sizes.micro, 129))
        result = engine.train_step([Batch(rows) for rows in tokens], 1e-3)
        results.append((result.loss, result.grad_norm))
        engine.mean_loss([Batch(tokens[0, :1, :65])])
    return results, torch.cuda.get_rng_state(), engine


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_are_those_of_an_ordinary_run(name: str) -> None:
    config = load_config([], KEYS | CASES[name])
    expected, state, plain = steps(config)
    got, captured_state, captured = steps(config.override({"cuda_graphs": True}))
    np.testing.assert_allclose(np.array(got, float), np.array(expected, float), **TOLERANCE)
    assert torch.equal(captured_state, state), "a resumed run draws the same numbers"
    for one, other in zip(captured.pieces(), plain.pieces(), strict=True):
        assert one.name == other.name
        if one.kind == "weight":
            torch.testing.assert_close(one.tensor.float(), other.tensor.float(), **TOLERANCE)
