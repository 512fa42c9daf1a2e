"""What tools/bench_attention.py measures: position methods in a shape."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_coca.config import Config, load_config
from megatron_coca.evaluation.speed.cases import CONTRACTION

METHODS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "coca": {"pos_emb": "coca"},
    "coca_strict": {"pos_emb": "coca_strict"},
    "xpos": {"pos_emb": "xpos"},
    "alibi": {"pos_emb": "alibi"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "kerple_power": {"pos_emb": "kerple_power"},
    "rpe": {"pos_emb": "rpe"},
    "none": {"pos_emb": "none"},
    "rotary+rerope": {"pos_emb": "rotary", "relative_positions": {"type": "rerope"}},
    "coca+rerope": {"pos_emb": "coca", "relative_positions": {"type": "rerope"}},
    "rotary+leaky_rerope": {"pos_emb": "rotary", "relative_positions": {"type": "leaky_rerope"}},
    "rotary+self_extend": {"pos_emb": "rotary", "relative_positions": {"type": "self_extend"}},
    "rotary+lm_infinite": {"pos_emb": "rotary", "relative_positions": {"type": "lm_infinite"}},
    "rotary+streaming": {"pos_emb": "rotary", "relative_positions": {"type": "streaming"}},
    "coca+dynamic_ntk": {"pos_emb": "coca", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    CONTRACTION: {"pos_emb": "coca"},
}
"""Configuration keys by the benchmark's names. The contraction is CoCA as its paper writes it, by opt_einsum alone."""


@dataclass(frozen=True)
class Shape:
    """What all cases of a run share; `tokens` in a batch (at least one row), `training_length` L, which the windows of
    the relative-position maps come from.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    device: str
    tokens: int
    training_length: int

    def batch(self, length: int) -> int:
        """Rows of `length` tokens."""
        return max(1, self.tokens // length)

    def packed(self, length: int, extra: int = 0) -> Tensor:
        """What `query_key_value` gives, [batch(length), length + extra, rows]: standard normal numbers."""
        size = (self.batch(length), length + extra, (self.heads + 2 * self.kv_heads) * self.head_dim)
        generator = torch.Generator(self.device).manual_seed(length)
        return torch.randn(size, generator=generator, device=self.device).to(getattr(torch, self.dtype))

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [batch, heads, length, head_dim], k, v [batch, kv_heads, length, head_dim]: the views `SelfAttention`
        takes.
        """
        if self.kv_heads == self.heads:
            q, k, v = packed.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)
        else:
            heads = packed.unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    method: str
    backend: str
    operands: str = "torch"

    def __str__(self) -> str:
        return f"{self.method} {self.backend}{' fused operands' if self.operands == 'triton' else ''}"


def configuration(name: str, operands: str, shape: Shape) -> Config:
    """The configuration of a method in a model of one layer."""
    keys = {"num_layers": 1, "hidden_size": shape.heads * shape.head_dim, "num_attention_heads": shape.heads}
    keys |= {"seq_length": shape.training_length, "operand_kernel": operands}
    return load_config([], keys | METHODS[name])
