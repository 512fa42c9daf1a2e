"""The transformer block of GPT-NeoX and LLaMA: pre-norm, sequential or parallel residual."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import Backend
from megatron_coca.attention.layer import LayerCache, SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.config import ModelConfig


class ScaleNorm(nn.Module):
    """g * x / |x| with one learned g (Nguyen and Salazar 2019); x [..., hidden_size], the norm is taken in float32."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.g * (x / x.float().norm(dim=-1, keepdim=True).clamp(min=self.eps)).to(x.dtype)


NORMS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": lambda m: nn.LayerNorm(m.hidden_size, m.layernorm_epsilon, bias=m.use_bias_in_norms),
    "rmsnorm": lambda m: nn.RMSNorm(m.hidden_size, m.rms_norm_epsilon),
    "scalenorm": lambda m: ScaleNorm(m.hidden_size, m.scalenorm_epsilon),
    "non_parametric_layernorm": lambda m: nn.LayerNorm(m.hidden_size, m.layernorm_epsilon, elementwise_affine=False),
}


def build_norm(model: ModelConfig) -> nn.Module:
    """A fresh layer of the configured kind for hidden states [..., hidden_size]."""
    return NORMS[model.norm](model)


Activation = Callable[[Tensor], Tensor]

PLAIN: dict[str, Activation] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "mish": F.mish,
    "softsign": F.softsign,
}
GATED: dict[str, Activation] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "bilinear": lambda gate: gate,
}

TOKENS_AT_ONCE = 8192
"""Without gradients the inner features, four times the hidden ones and more, are held of so many tokens only."""


class MLP(nn.Module):
    """linear2(act(linear1 x)), or linear2(value * act(gate)) with (value | gate) = linear1 x, as GPT-NeoX packs them.

    Hidden states [..., hidden_size] -> the same.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gated = model.activation in GATED
        self.activation = _activation(model)
        width = model.ffn_hidden_size
        self.linear1 = nn.Linear(model.hidden_size, 2 * width if self.gated else width, bias=model.use_bias_in_mlp)
        self.linear2 = nn.Linear(width, model.hidden_size, bias=model.use_bias_in_mlp)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.numel() // x.shape[-1] <= TOKENS_AT_ONCE:
            return self._feed(x)
        parts = [self._feed(part) for part in x.flatten(0, -2).split(TOKENS_AT_ONCE)]
        return torch.cat(parts).view(x.shape)

    def _feed(self, x: Tensor) -> Tensor:
        inner = self.linear1(x)
        if self.gated:
            value, gate = inner.chunk(2, dim=-1)
            return self.linear2(value * self.activation(gate))
        return self.linear2(self.activation(inner))


def _activation(model: ModelConfig) -> Activation:
    if model.activation == "gelu" and model.bias_gelu_fusion:
        return partial(F.gelu, approximate="tanh")  # what upstream's fused kernel computes
    return GATED.get(model.activation) or PLAIN[model.activation]


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

    def forward(
        self, x: Tensor, frame: PositionContext, cache: LayerCache | None = None, last: int | None = None
    ) -> Tensor:
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
