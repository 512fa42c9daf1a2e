"""The transformer block of GPT-NeoX and LLaMA: pre-norm, sequential or parallel residual."""

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.cache import LayerCache
from megatron_coca.attention.frame import Frame
from megatron_coca.attention.inputs import Backend
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.config import ModelConfig
from megatron_coca.model.mlp import MLP
from megatron_coca.model.norms import build_norm


class Block(nn.Module):
    """Hidden states [batch, length, hidden_size] -> the same.

    Sequential: x += attention(norm1 x); x += mlp(norm2 x). Parallel (`gpt_j_residual`): x + attention(norm1 x) +
    mlp(norm2 x), with `gpt_j_tied` norm1 in place of norm2.
    """

    def __init__(self, model: ModelConfig, method: PositionMethod, backend: Backend) -> None:
        super().__init__()
        self.parallel, self.tied_norm, self.dropout = model.gpt_j_residual, model.gpt_j_tied, model.hidden_dropout
        self.input_layernorm = build_norm(model)
        self.attention = SelfAttention(
            model.hidden_size,
            model.num_attention_heads,
            model.num_kv_heads,
            method,
            backend,
            model.use_bias_in_attn_linear,
            model.attention_dropout,
        )
        if not (self.parallel and self.tied_norm):
            self.post_attention_layernorm = build_norm(model)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, frame: Frame, cache: LayerCache | None = None, last: int | None = None) -> Tensor:
        """`last` asks for the hidden states of the last so many tokens alone: [batch, last, hidden_size]."""
        normed = self.input_layernorm(x)
        attended = self._drop(self.attention(normed, frame, cache))
        if last is not None:
            x, normed, attended = x[:, -last:], normed[:, -last:], attended[:, -last:]
        if self.parallel:
            return x + attended + self._drop(self.mlp(normed if self.tied_norm else self.post_attention_layernorm(x)))
        x = x + attended
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
