"""Frequencies and multipliers against those of transformers for extensions with the same names."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_coca.attention.positions.frequencies import Rotary, Scaling

DIM, TRAINED = 64, 512
SHORT, LONG = (tuple(1.0 + rate * j for j in range(DIM // 2)) for rate in (0.125, 2.0))
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn-betas": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    "longrope": {"rope_type": "longrope", "factor": 8.0, "short_factor": SHORT, "long_factor": LONG},
    "longrope-attention_factor": {
        "rope_type": "longrope",
        "factor": 8.0,
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.25,
    },
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def theirs(scaling: dict[str, Any], base: float, length: int) -> tuple[torch.Tensor, float]:
    """inv_freq and attention_factor of transformers for an input of `length` tokens."""
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in scaling.items()}
    lists |= {"rope_theta": base, "original_max_position_embeddings": TRAINED}
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters=lists,
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("length", [1, TRAINED, TRAINED + 1, 8 * TRAINED])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", CASES)
def test_frequencies(name: str, base: float, length: int) -> None:
    rotary = Rotary(DIM, base, TRAINED, Scaling(**CASES[name]))
    frequencies, factor = theirs(CASES[name], base, length)
    torch.testing.assert_close(rotary.inverse_frequencies(length).float(), frequencies, rtol=1e-6, atol=0)
    assert rotary.multiplier(length) == pytest.approx(factor, rel=1e-12)
