"""The feed-forward layer: plain or gated, by the activation's name."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.config import ModelConfig

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
