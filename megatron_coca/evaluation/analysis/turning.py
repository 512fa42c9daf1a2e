"""What the score of one pair of tokens would be at every distance, and what bounds it.

The paper's a(s) is a function of the distance alone, for a query and a key that stay what they are. Text shows each
pair at one distance only, so here the pair is put apart: the query at the last position, the key before it, both
rotated by the model's own position method.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_coca.attention.encoding import PositionEncoding
from megatron_coca.attention.frame import Frame
from megatron_coca.attention.inputs import AttentionInputs, DistanceBias
from megatron_coca.attention.method import PositionMethod
from megatron_coca.evaluation.analysis.angles import PAIRS, planar


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
        self.frame: Frame = encoding(self.last, length, torch.float64, key_positions=self.keys)
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
        for part in self.method.parts:
            moved = part.query(last, keys[:1]) - part.key(keys, keys[:1])
            relative = torch.where(self._served(part.low, part.high, None), moved, relative)
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
