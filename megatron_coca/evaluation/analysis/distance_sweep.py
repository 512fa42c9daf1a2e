"""Initial angles of pairs of tokens, and the scores of a pair at every distance with the bounds on them.

The paper's a(s) is a function of the distance alone, for a fixed query and key. Text shows each pair at one distance
only, so `DistanceSweep` moves the pair: the query to the last position, the key before it, both rotated by the model's
own position method.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_coca import methods
from megatron_coca.attention.context import mapped
from megatron_coca.attention.inputs import Band, DistanceBias, bias_of_pairs
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.evaluation.analysis.attention_maps import in_band
from megatron_coca.evaluation.analysis.records import Angles, Border, Borders, Quantiles, Share
from megatron_coca.model.layers import soft_capped

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
COLLINEAR = 1e-9
"""Radians below which two directions count as one. In float64 rounding moves a product u q away from q by 1e-16; what
a float32 projection can express is a thousand times this and more."""
BINS = 24
"""Bins of the histograms: 15 degrees each, one centred on 0, so that rounding cannot split a peak there."""
FULL_CIRCLE = 2 * math.pi
COCA_FORMS = ("coca", "coca_strict")
ROTATED_FORMS = methods.names("pos_emb", rotary=True)


def share(holds: np.ndarray, among: np.ndarray | None = None) -> Share:
    taken = holds if among is None else holds[among]
    return float(taken.mean()) if taken.size else None


def mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if values.size else None


def quantiles(values: np.ndarray) -> Quantiles:
    return np.quantile(values.astype(np.float64), QUANTILES).tolist() if values.size else None


def planar(method: PositionMethod, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The papers' q_j and k_j as complex numbers [..., d/2] complex128, of unrotated q and k [..., head_dim].

    Feature i is the real and feature i + d/2 the imaginary part. For CoCA k is the T projection t, and k_j = q_j * u_j
    with u_j from t (the paper's equations 6 and 7).
    """

    def complex_pairs(x: Tensor) -> Tensor:
        real, imaginary = x[..., : method.rotary_dim].double().chunk(2, dim=-1)
        return torch.complex(real.contiguous(), imaginary.contiguous())

    queries = complex_pairs(q)
    if method.name not in COCA_FORMS:
        return queries, complex_pairs(k)
    u = method.form.kept(k[..., : method.rotary_dim].double())
    return queries, torch.complex(queries.real * u, queries.imag * u)


def initial_angles(method: PositionMethod, q: Tensor, k: Tensor) -> Tensor:
    """Theta_j of pairs of tokens, [..., d/2] float64 in (-pi, pi], NaN where q_j or k_j is zero; arguments as for
    `planar`.
    """
    queries, keys = planar(method, q, k)
    product = queries * keys.conj()
    angle = torch.where(product.real.eq(0) & product.imag.eq(0), math.nan, product.angle())
    return torch.where(angle.le(-math.pi), math.pi, angle)


def summarise_angles(theta: np.ndarray) -> Angles:
    """Histograms and shares of angles [layers, heads, samples, d/2]."""
    defined, anomalous = ~np.isnan(theta), theta < -COLLINEAR
    layers, heads, _, planes = theta.shape
    nearest = np.rint(np.nan_to_num(theta) * (BINS / FULL_CIRCLE)).astype(np.int64)
    # Angles next to -pi belong to the bin of pi; -1 where there is no angle.
    bins = np.where(defined, (nearest + BINS // 2 - 1) % BINS, -1)

    def counts(selected: np.ndarray) -> list[int]:
        return np.bincount(selected.ravel() + 1, minlength=BINS + 1)[1:].tolist()

    return Angles(
        edges=[(index - BINS // 2 + 0.5) * FULL_CIRCLE / BINS for index in range(BINS + 1)],
        counts_by_head=[[counts(bins[layer, head]) for head in range(heads)] for layer in range(layers)],
        counts_by_pair=[counts(bins[..., j]) for j in range(planes)],
        undefined=share(~defined),
        collinear=share(np.abs(theta) <= COLLINEAR, defined),
        anomalous=share(anomalous, defined),
        anomalous_by_head=[
            [share(anomalous[layer, head], defined[layer, head]) for head in range(heads)] for layer in range(layers)
        ],
        anomalous_by_pair=[share(anomalous[..., j], defined[..., j]) for j in range(planes)],
        largest=float(np.nanmax(np.abs(theta))) if defined.any() else None,
    )


def summarise_borders(theta: np.ndarray, frequencies: np.ndarray, training_length: int, length: int) -> Borders:
    """The borders of angles [layers, heads, samples, d/2] that grow by `frequencies` [d/2] radians per token."""
    angles = theta.reshape(-1, theta.shape[-1]).astype(np.float64)
    angles = np.where(np.abs(angles) <= COLLINEAR, 0.0, angles)
    defined = ~np.isnan(angles)
    planes = range(angles.shape[1])

    def border(distance: np.ndarray) -> Border:
        exists = ~np.isnan(distance)
        known = [distance[exists[:, j], j] for j in planes]
        return Border(
            exists=[share(exists[:, j], defined[:, j]) for j in planes],
            mean=[mean(distances) for distances in known],
            quantiles=[quantiles(distances) for distances in known],
            within_training=[share(distance[:, j] <= training_length, defined[:, j]) for j in planes],
            within_length=[share(distance[:, j] <= length, defined[:, j]) for j in planes],
            beyond_training=share(distance > training_length, defined),
        )

    to_k = np.where(angles < -COLLINEAR, -angles, math.nan)
    return Borders(
        frequencies=frequencies.tolist(),
        k=border(to_k / frequencies),
        minus_q=border((math.pi - angles) / frequencies),
        q=border((FULL_CIRCLE - angles) / frequencies),
    )


def rotary_frequencies(encoding: PositionEncoding, length: int) -> Tensor:
    """theta_j for an input of `length` tokens, [d/2] float64 on the CPU, radians per token; of a rotary method."""
    rotary, clex = encoding.method.rotary, encoding.clex
    assert rotary is not None
    inverse = rotary.inverse_frequencies(length) if clex is None else clex.inverse_frequencies(clex.factor_for(length))
    return inverse.detach().cpu()


def rotated_distances(bands: tuple[Band, ...], last: Tensor, keys: Tensor) -> Tensor:
    """The distances [keys] float64 by which a query at position `last` [1] and `keys` are rotated, after the map."""
    relative = torch.zeros_like(keys)
    for band in bands:
        distance = mapped(last, keys[:1], band.query_positions) - mapped(keys, keys[:1], band.key_positions)
        relative = torch.where(in_band(replace(band, first_keys=None), last - keys, keys), distance, relative)
    return relative


@dataclass(frozen=True)
class SweptScores:
    """Scores of pairs of tokens at all distances of a sweep, on the CPU.

    The bounds are None where the score is not a sum over rotated pairs of fixed amplitudes.
    """

    scores: Tensor  # [pairs, heads, distances] float64, of the rotated features where there are any, else of all
    visible: Tensor  # [distances] bool, whether the method shows a key at that distance at all
    bound_rope: Tensor | None = None  # [pairs, heads, distances]
    bound_coca: Tensor | None = None


class DistanceSweep:
    """Scores pairs of tokens at each of `distances` (ascending), as in an input of `length` tokens."""

    def __init__(self, encoding: PositionEncoding, distances: list[int], length: int, device: torch.device) -> None:
        self.method: PositionMethod = encoding.method
        ascending = torch.tensor(distances, device=device)
        self.keys = distances[-1] - ascending.flip(0)  # positions of the keys, ascending as in a sequence
        self.last = torch.tensor([distances[-1]], device=device)  # the position of the query
        self.frame = encoding(self.last, length, torch.float64, key_positions=self.keys)
        bounded = self.method.name in ROTATED_FORMS and not self.method.form.decay
        self.partial_sums = self._partial_sums(encoding, length) if bounded else None

    def scores(self, q: Tensor, k: Tensor, bias: DistanceBias | None, factor: Tensor | None = None) -> SweptScores:
        """Scores of q and k [pairs, heads, head_dim], unrotated, with the layer's bias and learned `factor` [heads] or
        [heads, 2]; without forgetting gates, which belong to the tokens between the two.
        """
        q, k = q.double(), k.double()
        everywhere = k[:, :, None].expand(-1, -1, len(self.keys), -1)
        inputs = self.method.prepare(q[:, :, None], everywhere, everywhere, self.frame, bias=bias, factor=factor)
        width = self.method.rotary_dim or self.method.head_dim
        scores = torch.full((*inputs.key.shape[:3],), math.nan, dtype=torch.float64, device=self.keys.device)
        visible = torch.zeros(len(self.keys), dtype=torch.bool, device=self.keys.device)
        for segment in inputs.segments:
            served = in_band(segment.band, self.last - self.keys, self.keys)
            product = (segment.query[..., :width] * segment.key[..., :width]).sum(-1).double() * inputs.scale
            product = soft_capped(product, inputs.softcap)
            scores, visible = torch.where(served, product, scores), visible | served
        if inputs.bias is not None:
            distances = (self.last - self.keys).double()
            scores = scores + bias_of_pairs(inputs.bias, distances, self.last.double())
        scores, visible = scores.flip(-1).cpu(), visible.flip(0).cpu()
        if self.partial_sums is None:
            return SweptScores(scores, visible)
        # max_i |h_{i+1} - h_i| sum_j |S_{j+1}| and max_i |l_{i+1} - l_i| sum_j |C_{j+1}| with h_j = q_j conj(k_j) and
        # l_j = |h_j|, both 0 at d/2 (Su et al. 2021, section 3.4.3; the CoCA paper's equations 19 and 20).
        queries, keys = planar(self.method, q, k)
        h = queries * keys.conj()
        bounds = []
        for amplitudes, sums in zip((h, h.abs()), self.partial_sums, strict=True):
            following = torch.cat((amplitudes[..., 1:], torch.zeros_like(amplitudes[..., :1])), dim=-1)
            largest_step = (following - amplitudes).abs().amax(dim=-1)
            largest_step = largest_step if factor is None else largest_step * self._of_heads(factor).abs()
            bounds.append((largest_step[..., None] * sums).cpu())
        return SweptScores(scores, visible, *bounds)

    def _of_heads(self, factor: Tensor) -> Tensor:
        """What a learned factor multiplies the partial sums by, [heads]."""
        head_factor = self.frame.head_factor
        return factor if head_factor is None else factor[:, 0] * head_factor[0, 0] + factor[:, 1]

    def _partial_sums(self, encoding: PositionEncoding, length: int) -> tuple[Tensor, Tensor]:
        """sum_j |S_{j+1}| and sum_j |C_{j+1}| of the rotations e^(i r theta_k) and cos(r theta_k) summed over k <= j,
        [distances], times every factor of a score.
        """
        method, rotary = self.method, self.method.rotary
        assert rotary is not None
        last, keys = self.last.double(), self.keys.double()
        phases = rotated_distances(method.bands, last, keys).flip(0)[:, None] * rotary_frequencies(encoding, length).to(
            keys.device
        )
        rotations = torch.polar(torch.ones_like(phases), phases).cumsum(-1).abs().sum(-1)
        cosines = phases.cos().cumsum(-1).abs().sum(-1)
        factor = method.scale * (rotary.multiplier(length) ** 2 if encoding.clex is None else 1.0)
        if method.logit_scaling is not None and not method.factor_bias:
            factor *= float(method.logit_scaling(last, method.training_length))
        return factor * rotations, factor * cosines
