"""Small checkpoints with random weights, norms and biases included, for the tests of exports."""

from pathlib import Path
from typing import Any

import torch

from megatron_coca.config import load_config
from megatron_coca.data import Tokenizer
from megatron_coca.model import build_model
from tests.checkpoint_files import BYTES, write_checkpoint

TRAINED = 32
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": TRAINED}
SHAPE |= {"vocab_size": 500, "pos_emb": "rotary", "no_weight_tying": True}
NEOX: dict[str, Any] = {"rotary_pct": 0.5, "gpt_j_residual": True}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "intermediate_size": 156,
    "use_bias_in_attn_linear": False,
    "use_bias_in_mlp": False,
    "use_bias_in_norms": False,
}


def random_checkpoint(
    save: Path, dtype: torch.dtype = torch.float32, tokenizer: Tokenizer | None = BYTES, **keys: Any
) -> Path:
    """A checkpoint of one step as a run leaves it, as far as evaluation and export read it."""
    config = load_config([], SHAPE | keys)
    torch.manual_seed(0)
    weights = {
        name: (weight + 0.1 * torch.randn(weight.shape)).to(dtype)
        for name, weight in build_model(config).state_dict().items()
    }
    return write_checkpoint(save, config, weights, tokenizer)
