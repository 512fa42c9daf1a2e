"""Small models of transformers with random weights, biases and norms included, and their logits."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedConfig

from megatron_coca import load_model

TRAINED = 32
"""max_position_embeddings of the models here."""

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TRAINED,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 8,
}
EXTENSIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "yarn": YARN,
    "llama3": LLAMA3,
    "longrope": LONGROPE,
}
"""Every extension that transformers and we have."""


def neox(**changes: Any) -> GPTNeoXConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": changes.pop("rotary_pct", 0.25)}
    return GPTNeoXConfig(**COMMON, intermediate_size=80, rope_parameters=rope | changes.pop("rope", {}), **changes)


def llama(**changes: Any) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0} | changes.pop("rope", {})
    return LlamaConfig(**COMMON, intermediate_size=52, rope_parameters=rope, **changes)


def write(config: PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """A model with random weights as transformers saves it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.to(dtype).save_pretrained(folder, **saving)
    return folder


@torch.no_grad()
def theirs(folder: Path, ids: Tensor) -> Tensor:
    """The logits of a fresh model: transformers' dynamic extension remembers the longest input it has seen."""
    return (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()(ids)
        .logits
    )


def tokens(length: int) -> Tensor:
    """int64 [2, length], the same at every call."""
    return torch.randint(96, (2, length), generator=torch.Generator().manual_seed(length))


def assert_same_logits(folder: Path, *lengths: int, ours: Path | None = None) -> None:
    """`ours` is what our side loads where that is not the folder itself."""
    model = load_model(ours or folder)
    for length in lengths:
        expected = theirs(folder, tokens(length))
        with torch.no_grad():
            found = model(tokens(length))
        assert expected.std() > 0.1 and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
