"""The gated attention unit in float64, pair by pair (Hua et al. 2022, section 3, with softmax in place of relu^2)."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def gated_unit(
    x: Tensor,
    weights: Mapping[str, Tensor],
    theta: Tensor,
    relative: Callable[[int, int], float] = lambda m, n: m - n,
    factor: Callable[[int], float] = lambda m: 1.0,
) -> Tensor:
    """x [length, hidden] -> [length, hidden], differentiable; feature i of q and k is rotated with feature i + s / 2.

    `weights` are named as in the layer, by the paper U, V and Z in one matrix; `theta` [s / 2] are the frequencies,
    `relative` the relative position of a pair, and `factor` that of a query's scores.
    """
    width, features = weights["dense.weight"].shape[1], weights["query_scale"].shape[0]
    packed = x @ weights["gate_value_base.weight"].T + weights["gate_value_base.bias"]
    u, v, z = (packed * torch.sigmoid(packed)).split((width, width, features), dim=1)
    q = z * weights["query_scale"] + weights["query_offset"]
    k = z * weights["key_scale"] + weights["key_offset"]
    rows = []
    for m in range(len(x)):
        scores = torch.stack([_score(q[m], k[n], theta * relative(m, n)) for n in range(m + 1)])
        shares = torch.softmax(scores * factor(m) / math.sqrt(features), dim=0)
        rows.append(shares @ v[: m + 1])
    return (u * torch.stack(rows)) @ weights["dense.weight"].T + weights["dense.bias"]


def _score(q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """Re sum_j q_j conj(k_j) exp(i angle_j), of pairs as complex numbers."""
    (a, b), (c, d) = q.chunk(2), k.chunk(2)
    return ((a * c + b * d) * angles.cos() + (a * d - b * c) * angles.sin()).sum()
