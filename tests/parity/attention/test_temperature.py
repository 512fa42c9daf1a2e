"""The temperature of Llama 4 and of Ministral 3 against transformers' own code."""

import pytest
import torch
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from megatron_coca.attention.build import build_method
from megatron_coca.config import load_config

MODEL = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 64, "pos_emb": "none"}


def factors(positions: torch.Tensor, **options: object) -> torch.Tensor:
    config = load_config([], MODEL | {"logit_scaling": {"type": "temperature", **options}})
    method = build_method(config.position, config.model)
    assert method.logit_scaling is not None
    return method.logit_scaling(positions.double(), method.training_length)


@pytest.mark.parametrize("strength", [0.1, 0.3])
def test_ministral(strength: float) -> None:
    positions = torch.arange(0, 1000)
    theirs = get_llama_4_attn_scale(positions[None].double(), strength, 64)[0, 0, :, 0]
    torch.testing.assert_close(factors(positions, strength=strength), theirs, rtol=1e-15, atol=0)


def test_llama4() -> None:
    """Its positions count from 1; the formula stands inside a method of its attention."""
    positions = torch.tensor([0, 8190, 8191, 8192, 100_000])
    theirs = torch.log1p(torch.floor((positions.float() + 1.0) / 8192)) * 0.1 + 1.0
    torch.testing.assert_close(factors(positions, period=8192, first=1).float(), theirs)
    assert factors(positions, period=8192, first=1)[1:3].tolist() == [1, pytest.approx(1.0693147)]
