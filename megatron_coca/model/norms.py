"""Normalisation layers by the names of GPT-NeoX."""

from collections.abc import Callable

import torch
import torch.nn as nn
from torch import Tensor

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
