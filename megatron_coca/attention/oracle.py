"""Attention as the papers write it, in float64: what every other path of this package is tested against.

It imports nothing of the production code and makes no attempt at speed: scores are N x N, rotations are complex
multiplications, CoCA is the papers' three-operand contraction. A dtype below float64 can be asked for, to measure the
memory and time of the
contraction itself.
"""

import math
from collections.abc import Callable

import opt_einsum
import torch
from torch import Tensor

Scores = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def frequencies(
    dim: int,
    base: float = 10000.0,
    rope_type: str = "default",
    factor: float = 1.0,
    training_length: int = 1,
    length: int = 1,
) -> Tensor:
    """theta_j, written out pair by pair, [dim/2] float64."""
    alpha = {
        "default": 1.0,
        "linear": 1.0,
        "ntk": factor,
        "dynamic": factor * length / training_length - (factor - 1) if length > training_length else 1.0,
    }[rope_type]
    stretched = base * alpha ** (dim / (dim - 2)) if dim > 2 else base
    theta = [stretched ** (-2 * j / dim) / (factor if rope_type == "linear" else 1.0) for j in range(dim // 2)]
    return torch.tensor(theta, dtype=torch.float64)


def attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor,
    positions: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Causal attention of method `name` for q [batch, heads, length, head_dim] and k, v [batch, kv_heads, length,
    head_dim].

    `theta` has one frequency per rotated pair: 2 * len(theta) < head_dim is partial rotary. Returns [batch, heads,
    length, head_dim].
    """
    length, groups = q.shape[-2], q.shape[1] // k.shape[1]
    positions = torch.arange(length, device=q.device) if positions is None else positions
    q, k, v = q.to(dtype), k.to(dtype).repeat_interleave(groups, 1), v.to(dtype).repeat_interleave(groups, 1)
    scores = SCORES[name](q, k, theta, positions) / math.sqrt(q.shape[-1])
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return opt_einsum.contract("bhmn,bhnd->bhmd", torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1), v)


def _turn(x: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """R_p x: pair (i, i + d/2) as a complex number, multiplied by e^(i p theta)."""
    first, second = x.chunk(2, dim=-1)
    phase = positions.to(torch.float64)[:, None] * theta
    unit = torch.complex(phase.cos().to(x.dtype), phase.sin().to(x.dtype))
    turned = torch.complex(first.contiguous(), second.contiguous()) * unit
    return torch.cat((turned.real, turned.imag), dim=-1)


def _split(x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : 2 * len(theta)], x[..., 2 * len(theta) :]


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return opt_einsum.contract("bhmd,bhnd->bhmn", q, k)


def _collinear(t: Tensor) -> Tensor:
    mean = torch.relu((t[..., : t.shape[-1] // 2] + t[..., t.shape[-1] // 2 :]) / 2)
    return torch.cat((mean, mean), dim=-1)


def _rotary_scores(q: Tensor, k: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    (q_turned, q_rest), (k_turned, k_rest) = _split(q, theta), _split(k, theta)
    return _dot(_turn(q_turned, theta, positions), _turn(k_turned, theta, positions)) + _dot(q_rest, k_rest)


def _coca_scores(q: Tensor, t: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """The contraction of the CoCA paper's listing: sum_d q_d (R_n t)_d (R_m q)_d."""
    (q, q_rest), (t, t_rest) = _split(q, theta), _split(t, theta)
    turned_q, turned_t = _turn(q, theta, positions), _turn(_collinear(t), theta, positions)
    return opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, turned_t, turned_q) + _position_free_coca(q_rest, t_rest)


def _coca_strict_scores(q: Tensor, t: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """sum_j u_j |q_j|^2 cos((m - n) theta_j), pair by pair."""
    (q, q_rest), (t, t_rest) = _split(q, theta), _split(t, theta)
    first, second = q.chunk(2, dim=-1)
    u = _collinear(t)[..., : len(theta)]
    distance = (positions[:, None] - positions[None, :]).to(torch.float64)
    scores = _position_free_coca(q_rest, t_rest)
    for j in range(len(theta)):
        weight = (first[..., j] ** 2 + second[..., j] ** 2)[..., :, None] * u[..., j][..., None, :]
        scores = scores + weight * torch.cos(distance * theta[j]).to(q.dtype)
    return scores


def _position_free_coca(q: Tensor, t: Tensor) -> Tensor:
    """CoCA without rotation, for the dimensions beyond the rotary block."""
    return opt_einsum.contract("bhmd,bhnd,bhmd->bhmn", q, torch.relu(t), q)


def _alibi_scores(q: Tensor, k: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    distance = (positions[:, None] - positions[None, :]).to(q.dtype)
    slopes = torch.tensor(_slopes(q.shape[1]), dtype=q.dtype, device=q.device)
    return _dot(q, k) - slopes[:, None, None] * distance * math.sqrt(q.shape[-1])


def _slopes(heads: int) -> list[float]:
    """The ALiBi authors' recursion: a power of two, or the closest smaller one and alternate slopes of twice that."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    closest = 1 << (heads.bit_length() - 1)
    return _slopes(closest) + _slopes(2 * closest)[0::2][: heads - closest]


def _plain_scores(q: Tensor, k: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    return _dot(q, k)


SCORES: dict[str, Scores] = {
    "rotary": _rotary_scores,
    "coca": _coca_scores,
    "coca_strict": _coca_strict_scores,
    "alibi": _alibi_scores,
    "learned": _plain_scores,
    "none": _plain_scores,
}
