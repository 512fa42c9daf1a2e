"""Constant angles of polar forms: initial values, shapes and limits."""

import math
from typing import Any

import pytest
import torch

from megatron_coca.attention.positions.offsets import HeadOffsets
from megatron_coca.config import load_config
from megatron_coca.model import build_model
from megatron_coca.model.gpt import GPT

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "seq_length": 8,
    "vocab_size": 50,
}


def build(pos_emb: str, **options: Any) -> GPT:
    return build_model(load_config([], SHAPE | {"pos_emb": pos_emb, "pos_emb_options": options}))


def test_initial_values() -> None:
    """One angle per head and magnitude, different in every layer and head; other weights do not depend on them."""
    none, zero, uniform, free = (
        build("pope", offset=name).state_dict() for name in ("none", "zero", "uniform", "free")
    )
    names = [f"blocks.{layer}.attention.position_offsets.bias" for layer in (0, 1)]
    assert zero.keys() == uniform.keys() == free.keys() == none.keys() | set(names)
    assert all(torch.equal(none[name], uniform[name]) and torch.equal(none[name], zero[name]) for name in none)
    assert all(zero[name].shape == (3, 16) and not zero[name].any() for name in names)
    assert all(torch.equal(free[name], zero[name]) for name in zero)
    drawn = torch.cat([uniform[name] for name in names])
    assert drawn.min() >= -2 * math.pi and drawn.max() <= 0 and abs(drawn.mean() + math.pi) < 0.6
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize(("magnitude", "frequencies", "count"), [("softplus", "pair", 16), ("relu_mean", "pair", 8)])
def test_there_is_one_angle_per_magnitude(magnitude: str, frequencies: str, count: int) -> None:
    model = build("polar", magnitude=magnitude, frequencies=frequencies)
    assert model.blocks[0].attention.position_offsets.bias.shape == (3, count)


def test_learned_angles_are_clamped_with_gradients_up_to_the_limits() -> None:
    """Between -2 pi and 0. At 0, the initial value, the gradient passes; beyond a limit it is 0."""
    offsets = HeadOffsets(1, 4, "zero")
    with torch.no_grad():
        offsets.bias.copy_(torch.tensor([[0.0, -1.0, 0.5, -7.0]]))
    found = offsets()
    assert found.tolist() == [[0.0, -1.0, 0.0, pytest.approx(-2 * math.pi)]]
    assert torch.autograd.grad(found.sum(), offsets.bias)[0].tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert offsets.to(torch.bfloat16)().dtype == torch.float32


def test_free_angles_have_no_limits() -> None:
    """An angle of PoPE that leaves its range is stuck, and this one is not."""
    offsets = HeadOffsets(1, 3, "free")
    with torch.no_grad():
        offsets.bias.copy_(torch.tensor([[0.5, -1.0, -7.0]]))
    found = offsets()
    assert torch.equal(found, offsets.bias)
    assert torch.autograd.grad(found.sum(), offsets.bias)[0].tolist() == [[1.0, 1.0, 1.0]]
