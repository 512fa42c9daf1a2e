"""Steps with passes in a CUDA graph: the bits of steps without one. Run with: python -m pytest -m gpu"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_coca.checkpoints.native.state import StatePiece
from megatron_coca.config import load_config
from megatron_coca.data import Batch
from megatron_coca.model import build_model
from megatron_coca.training.engine import NativeEngine, StepResult, build_engine, group
from megatron_coca.training.engine.passes import WARMUP
from megatron_coca.training.randomness import compute_deterministically
from tests.checkpoint_files import run_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTH, VOCABULARY, STEPS, RESUMED = 128, 512, 8, 4
KEYS = {
    "engine": "native",
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "vocab_size": VOCABULARY,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 0.5,
    "optimizer.params.lr": 1e-3,
    "precision": "bfloat16",
    "deterministic": True,
    "pos_emb": "coca",
}
CASES: dict[str, dict[str, Any]] = {
    "coca": {},
    "uncompiled": {"torch_compile": False},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "sums in float32": {"data_types": {"grad_accum_dtype": "fp32"}},
    "float32": {"precision": "fp32"},
    "rerope, triton": {"relative_positions": {"type": "rerope", "window": 32}, "attention_backend": "triton"},
    "alibi": {"pos_emb": "alibi"},
    "dropout": {"pos_emb": "rotary", "hidden_dropout": 0.2, "attention_dropout": 0.2, "torch_compile": False},
    "dropout, compiled": {"pos_emb": "rotary", "hidden_dropout": 0.2},
    "recomputed": {"checkpoint_activations": True},
    "lion, frozen weights": {"optimizer.type": "lion", "trainable": ["query", "key", "mlp"]},
}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_alone(monkeypatch)
    monkeypatch.setattr(group, "local_device", lambda: "cuda:0")
    compute_deterministically(True)
    yield
    compute_deterministically(False)


class Trained(NamedTuple):
    """The results of steps, and the state afterwards."""

    steps: list[StepResult]
    pieces: dict[tuple[str, str, int], Tensor]
    counters: dict[str, float]
    random: Tensor


def engine_of(keys: dict[str, Any], captured: bool) -> NativeEngine:
    config = load_config([], KEYS | keys | {"cuda_graphs": captured})
    torch.manual_seed(0)
    model = build_model(config, "cuda").train()
    engine = build_engine(model, config, config.batch.resolve(1))
    assert isinstance(engine, NativeEngine)
    return engine


def place(piece: StatePiece) -> tuple[str, str, int]:
    return piece.name, piece.kind, piece.start


def train(engine: NativeEngine, steps: range, masked: bool) -> Trained:
    """Steps with a validation at another length between them."""
    results, count = [], engine._config.batch.resolve(1).accumulation
    for step in steps:
        generator = np.random.default_rng(step)
        tokens = generator.integers(VOCABULARY // 8, size=(count, 4, LENGTH + 1))
        masks = generator.random((count, 4, LENGTH)) < 0.5
        batches = [Batch(rows, loss_mask=mask if masked else None) for rows, mask in zip(tokens, masks, strict=True)]
        results.append(engine.train_step(batches, 1e-3))
        engine.mean_loss([Batch(tokens[0, :1, : LENGTH // 2 + 1])])
    pieces = {place(piece): piece.tensor.clone() for piece in engine.pieces()}
    return Trained(results, pieces, engine.counters(), torch.cuda.get_rng_state())


def assert_equal(got: Trained, expected: Trained) -> None:
    assert got.steps[-len(expected.steps) :] == expected.steps[-len(got.steps) :]
    assert torch.equal(got.random, expected.random), "a resumed run draws the same numbers"
    assert got.pieces.keys() == expected.pieces.keys()
    assert not [key for key in got.pieces if not torch.equal(got.pieces[key], expected.pieces[key])]


@pytest.mark.parametrize("masked", [False, True], ids=["all labels", "loss masks"])
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_have_the_bits_of_others(name: str, masked: bool) -> None:
    """With accumulation and clipping. A run that is resumed after half of the steps, in a new engine, does too."""
    other, engine = (engine_of(CASES[name], captured) for captured in (False, True))
    torch.manual_seed(1)
    plain = train(other, range(STEPS), masked)
    assert any(step.grad_norm is not None and step.grad_norm > 0.5 for step in plain.steps), "never clips"
    torch.manual_seed(1)
    half = train(engine, range(RESUMED), masked)
    assert_equal(train(engine, range(RESUMED, STEPS), masked), plain)
    resumed = engine_of(CASES[name], True)
    for piece in resumed.pieces():
        piece.tensor.copy_(half.pieces[place(piece)])
    resumed.restored(half.counters)
    torch.cuda.set_rng_state(half.random)
    assert_equal(train(resumed, range(RESUMED, STEPS), masked), plain)
    assert engine._captured is not None and engine._captured._replay is not None and STEPS > RESUMED + WARMUP
