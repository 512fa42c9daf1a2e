"""Initial angles between queries and keys, and the distances at which they cross the rotary borders.

Section 2.2 and appendix D.2 of Zhu et al. 2024, "CoCA". In the plane of a rotated pair j, with Theta_j the angle from
k_j to q_j counterclockwise, the pair adds |q_j| |k_j| cos(Theta_j + r theta_j) to the score of a query that stands r >= 0
tokens after its key. The paper has Theta_j in [0, 2 pi) and calls a pair anomalous where Theta_j > pi: there the score
first rises, for tau = (2 pi - Theta_j)/theta_j tokens. Here the same angle is in (-pi, pi], so that anomalous pairs are
the negative ones, tau = -Theta_j/theta_j, and the borders, where rising and falling change, lie at 0 (the paper's k_j),
pi (-q_j) and 2 pi (q_j) for all pairs alike (the paper's equation 25).
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron_coca.attention.method import PositionMethod
from megatron_coca.evaluation.analysis.records import Angles, Border, Borders
from megatron_coca.evaluation.analysis.statistics import mean, quantiles, share

COLLINEAR = 1e-9
"""Radians up to which two directions count as one. In float64 rounding turns a product u q away from q by 1e-16; what
a float32 projection can express is a thousand times this and more."""
BINS = 24
"""Of the histograms: 15 degrees each, with the middle of one at 0, so that rounding cannot part a peak there."""
TURN = 2 * math.pi


def _members(x: Tensor) -> Tensor:
    """Feature i with feature i + d/2 as one complex number, [..., d] -> [..., d/2] complex128."""
    first, second = x.double().chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())


def _own_key(method: PositionMethod, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return _members(q), _members(k)


def _collinear_key(method: PositionMethod, q: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """k_n = q_m * t_n with both members of a pair of t_n equal (the paper's equations 6 and 7)."""
    pairs, u = _members(q), method.form.kept(t.double())
    return pairs, torch.complex(pairs.real * u, pairs.imag * u)


PAIRS: dict[str, Callable[[PositionMethod, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "rotary": _own_key,
    "xpos": _own_key,
    "coca": _collinear_key,
    "coca_strict": _collinear_key,
}
"""q_j and k_j as the papers define them, of the score forms that rotate."""


def planar(method: PositionMethod, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q_j and k_j as complex numbers [..., d/2] complex128, for the unrotated q and k [..., head_dim] of pairs of tokens."""
    dim = method.rotary_dim
    return PAIRS[method.name](method, q[..., :dim], k[..., :dim])


def initial_angles(method: PositionMethod, q: Tensor, k: Tensor) -> Tensor:
    """Theta_j of pairs of tokens, [..., d/2] float64 in (-pi, pi], NaN where q_j or k_j is zero; arguments as for
    `planar`.
    """
    of_query, of_key = planar(method, q, k)
    product = of_query * of_key.conj()
    angle = torch.where(product.real.eq(0) & product.imag.eq(0), math.nan, product.angle())
    return torch.where(angle.le(-math.pi), math.pi, angle)


def summarise_angles(theta: np.ndarray) -> Angles:
    """Of angles [layers, heads, samples, d/2]."""
    defined, anomalous = ~np.isnan(theta), is_anomalous(theta)
    layers, heads, _, planes = theta.shape
    bins = _bins(theta)
    return Angles(
        edges=[(index - BINS // 2 + 0.5) * TURN / BINS for index in range(BINS + 1)],
        counts_by_head=[[_counts(bins[at, head]) for head in range(heads)] for at in range(layers)],
        counts_by_pair=[_counts(bins[..., j]) for j in range(planes)],
        undefined=share(~defined),
        collinear=share(np.abs(theta) <= COLLINEAR, defined),
        anomalous=share(anomalous, defined),
        anomalous_by_head=[
            [share(anomalous[at, head], defined[at, head]) for head in range(heads)] for at in range(layers)
        ],
        anomalous_by_pair=[share(anomalous[..., j], defined[..., j]) for j in range(planes)],
        largest=float(np.nanmax(np.abs(theta))) if defined.any() else None,
    )


def is_anomalous(theta: np.ndarray) -> np.ndarray:
    """Whether the score of a pair first rises with the distance."""
    return theta < -COLLINEAR


def _bins(theta: np.ndarray) -> np.ndarray:
    """The bin of each angle, -1 where there is none; angles next to -pi are in the bin of pi."""
    nearest = np.rint(np.nan_to_num(theta) * (BINS / TURN)).astype(np.int64)
    return np.where(np.isnan(theta), -1, (nearest + BINS // 2 - 1) % BINS)


def _counts(bins: np.ndarray) -> list[int]:
    return np.bincount(bins.ravel() + 1, minlength=BINS + 1)[1:].tolist()


def summarise_borders(theta: np.ndarray, frequencies: np.ndarray, training_length: int, length: int) -> Borders:
    """Of angles [layers, heads, samples, d/2] that turn with `frequencies` [d/2] (radians a token)."""
    of_pairs = theta.reshape(-1, theta.shape[-1]).astype(np.float64)
    of_pairs = np.where(np.abs(of_pairs) <= COLLINEAR, 0.0, of_pairs)
    to_k = np.where(is_anomalous(of_pairs), -of_pairs, math.nan)
    lengths = training_length, length
    return Borders(
        frequencies=frequencies.tolist(),
        k=_border(to_k / frequencies, of_pairs, *lengths),
        minus_q=_border((math.pi - of_pairs) / frequencies, of_pairs, *lengths),
        q=_border((TURN - of_pairs) / frequencies, of_pairs, *lengths),
    )


def _border(distance: np.ndarray, theta: np.ndarray, training_length: int, length: int) -> Border:
    """Of distances [pairs, d/2] in tokens, NaN where there is no such border."""
    defined, exists = ~np.isnan(theta), ~np.isnan(distance)
    found = [distance[exists[:, j], j] for j in range(distance.shape[1])]
    planes = range(distance.shape[1])
    return Border(
        exists=[share(exists[:, j], defined[:, j]) for j in planes],
        mean=[mean(each) for each in found],
        quantiles=[quantiles(each) for each in found],
        within_training=[share(distance[:, j] <= training_length, defined[:, j]) for j in planes],
        within_length=[share(distance[:, j] <= length, defined[:, j]) for j in planes],
        beyond_training=share(distance > training_length, defined),
    )
