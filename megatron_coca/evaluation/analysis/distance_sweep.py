"""What the score of one pair of tokens would be at every distance, and what bounds it.

The paper's a(s) is a function of the distance alone, for a query and a key that stay what they are. Text shows each
pair at one distance only, so here the pair is put apart: the query at the last position, the key before it, both
rotated by the model's own position method.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import AttentionInputs, DistanceBias
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.evaluation.analysis.records import Angles, Border, Borders, Curve, Quantiles, Share

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def share(holds: np.ndarray, among: np.ndarray | None = None) -> Share:
    """The share of True in `holds`, or in those of its places where `among` is True."""
    taken = holds if among is None else holds[among]
    return float(taken.mean()) if taken.size else None


def mean(values: np.ndarray) -> float | None:
    """The mean of all values."""
    return float(values.mean(dtype=np.float64)) if values.size else None


def quantiles(values: np.ndarray) -> Quantiles:
    """At `QUANTILES`, linear between the samples."""
    return np.quantile(values.astype(np.float64), QUANTILES).tolist() if values.size else None


def curve(samples: list[np.ndarray]) -> Curve:
    """Of the samples of each distance."""
    return Curve(
        mean=[mean(values) for values in samples],
        mean_abs=[mean(np.abs(values)) for values in samples],
        quantiles_abs=[quantiles(np.abs(values)) for values in samples],
        pairs=[values.size for values in samples],
    )


def mean_of_shares(shares: list[Share]) -> Share:
    """The mean of those that there are."""
    known = [each for each in shares if each is not None]
    return math.fsum(known) / len(known) if known else None


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


def turning_frequencies(encoding: PositionEncoding, length: int) -> Tensor:
    """theta_j for an input of `length` tokens, [d/2] float64 on the CPU, radians a token; of a method that rotates."""
    rotary = encoding.method.rotary
    assert rotary is not None
    clex = encoding.clex
    found = rotary.inverse_frequencies(length) if clex is None else clex.inverse_frequencies(clex.factor_for(length))
    return found.detach().cpu()


@dataclass(frozen=True)
class Turned:
    """Pairs of tokens put apart.

    Attributes:
        scores: [pairs, heads, distances] float64, of the rotated features where there are any, else of all.
        visible: [distances], whether the method shows such a pair at all.
        bound_rope, bound_coca: [pairs, heads, distances], or None where the score is not a sum over rotated pairs of
            fixed amplitudes.
    """

    scores: Tensor
    visible: Tensor
    bound_rope: Tensor | None
    bound_coca: Tensor | None


class Turntable:
    """Puts pairs apart by `distances` (ascending), as in an input of `length` tokens."""

    def __init__(self, encoding: PositionEncoding, distances: list[int], length: int, device: torch.device) -> None:
        self.method: PositionMethod = encoding.method
        self.distances = torch.tensor(distances, device=device)
        self.keys = distances[-1] - self.distances.flip(0)  # ascending positions, as in a sequence
        self.last = torch.tensor([distances[-1]], device=device)
        self.frame: PositionContext = encoding(self.last, length, torch.float64, key_positions=self.keys)
        self._sums = self._partial_sums(encoding, length) if self._is_bounded() else None

    def turn(self, q: Tensor, k: Tensor, bias: DistanceBias | None) -> Turned:
        """For q and k [pairs, heads, head_dim], unrotated, and the layer's bias."""
        q, k = q.double(), k.double()
        cached = self.method.cached(k)[:, :, None].expand(-1, -1, len(self.keys), -1)
        inputs = self.method.prepare_cached(q[:, :, None], cached, cached, self.frame, bias)
        scores, visible = self._scores(inputs)
        if self._sums is None:
            return Turned(scores, visible, None, None)
        return Turned(scores, visible, *self._bounds(q, k))

    def _scores(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        width = self.method.rotary_dim or self.method.head_dim
        scores = torch.full((*inputs.key.shape[:3],), math.nan, dtype=torch.float64, device=self.keys.device)
        visible = torch.zeros(len(self.keys), dtype=torch.bool, device=self.keys.device)
        for segment in inputs.segments:
            here = self._served(segment.band.low, segment.band.high, segment.band.first_keys)
            product = (segment.query[..., :width] * segment.key[..., :width]).sum(-1).double() * inputs.scale
            scores, visible = torch.where(here, product, scores), visible | here
        if inputs.bias is not None:
            scores = scores + inputs.bias.at((self.last - self.keys).double())
        return scores.flip(-1), visible.flip(0)

    def _served(self, low: int, high: int | None, first_keys: int | None) -> Tensor:
        distance = self.last - self.keys
        inside = (distance >= low) & (distance < (len(distance) + int(self.last) if high is None else high))
        return inside if first_keys is None else inside & (self.keys < first_keys)

    def _is_bounded(self) -> bool:
        return self.method.name in PAIRS and not self.method.decay

    def _partial_sums(self, encoding: PositionEncoding, length: int) -> tuple[Tensor, Tensor]:
        """sum_j |S_{j+1}| and sum_j |C_{j+1}| of the rotations e^(i r theta_k) and cos(r theta_k) summed over k <= j,
        [distances], times everything that multiplies a score.
        """
        phases = self._relative()[:, None] * turning_frequencies(encoding, length).to(self.keys.device)
        of_rotations = torch.polar(torch.ones_like(phases), phases).cumsum(-1).abs().sum(-1)
        of_cosines = phases.cos().cumsum(-1).abs().sum(-1)
        factor = self.method.scale * self._multiplier(encoding, length)
        return factor * of_rotations, factor * of_cosines

    def _relative(self) -> Tensor:
        """Relative positions to which the method turns pairs at `distances`, float64."""
        last, keys = self.last.double(), self.keys.double()
        relative = torch.zeros_like(keys)
        for band in self.method.bands:
            moved = band.query_positions(last, keys[:1]) - band.key_positions(keys, keys[:1])
            relative = torch.where(self._served(band.low, band.high, None), moved, relative)
        return relative.flip(0)

    def _multiplier(self, encoding: PositionEncoding, length: int) -> float:
        rotary, scaling = self.method.rotary, self.method.logit_scaling
        assert rotary is not None
        of_extension = rotary.multiplier(length) ** 2 if encoding.clex is None else 1.0
        of_row = float(scaling(self.last.double(), self.method.training_length)) if scaling is not None else 1.0
        return of_extension * of_row

    def _bounds(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """max_i |h_{i+1} - h_i| sum_j |S_{j+1}| and max_i |l_{i+1} - l_i| sum_j |C_{j+1}| with h_j = q_j conj(k_j), l_j =
        |h_j|, both 0 at d/2 (Su et al. 2021, section 3.4.3; the CoCA paper's equations 19 and 20).
        """
        assert self._sums is not None
        of_query, of_key = planar(self.method, q, k)
        h = of_query * of_key.conj()
        rope, coca = (
            _largest_step(each)[..., None] * sums for each, sums in zip((h, h.abs()), self._sums, strict=True)
        )
        return rope, coca


def _largest_step(x: Tensor) -> Tensor:
    """max over i of |x_{i+1} - x_i| with x = 0 after the last, [..., n] -> [...]."""
    following = torch.cat((x[..., 1:], torch.zeros_like(x[..., :1])), dim=-1)
    return (following - x).abs().amax(dim=-1)
