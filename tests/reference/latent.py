"""Latent attention in float64 with keys and values of every head (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def normalised(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm."""
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def latent_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    heads: int,
    score: Callable[[Tensor, Tensor], Tensor],
    scale: float,
    factor: Tensor,
    epsilon: float = 1e-6,
) -> Tensor:
    """x [length, hidden] -> [length, hidden], differentiable.

    `weights` are named as in the layer; biases and the latent of queries may be missing. `score` maps rotated features
    of one head's queries and of the key that all heads share, [length, width] each, to scores [length, length]. `scale`
    multiplies all scores, and `factor` [length] those of each query.
    """

    def linear(name: str, y: Tensor) -> Tensor:
        return y @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros((), dtype=y.dtype))

    rank = len(weights["key_value_down_layernorm.weight"])
    if "query_up.weight" in weights:
        latent = normalised(linear("query_down", x), weights["query_down_layernorm.weight"], epsilon)
        queries = linear("query_up", latent)
    else:
        queries = linear("query", x)
    down = linear("key_value_down", x)
    shared = down[:, rank:]
    latent = normalised(down[:, :rank], weights["key_value_down_layernorm.weight"], epsilon)
    up = linear("key_value_up", latent)
    visible = torch.ones(len(x), len(x)).tril().bool()
    outputs = []
    for q, kv in zip(queries.chunk(heads, 1), up.chunk(heads, 1), strict=True):
        plain = q.shape[1] - shared.shape[1]
        scores = q[:, :plain] @ kv[:, :plain].T + score(q[:, plain:], shared)
        scores = (scores * scale * factor[:, None]).masked_fill(~visible, -torch.inf)
        outputs.append(torch.softmax(scores, dim=1) @ kv[:, plain:])
    return linear("dense", torch.cat(outputs, dim=1))
