"""Initial angles of pairs of tokens, and the scores of a pair at every distance.

The paper's a(s) depends only on the distance s between a fixed query and key, but in text each pair has one distance.
`DistanceSweep` varies the distance of a pair: it puts the query at the last position and the key at each position
before it, and rotates both with the model's own position method.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_coca import methods
from megatron_coca.attention.context import mapped
from megatron_coca.attention.inputs import Band, DistanceBias, bias_of_pairs, expanded
from megatron_coca.attention.method import PositionEncoding, PositionMethod
from megatron_coca.evaluation.attention_maps import in_band
from megatron_coca.model.layers import soft_capped

ROTATED_FORMS = methods.names("pos_emb", rotary=True)
POLAR = frozenset({"pope", "polar"})


def planar(method: PositionMethod, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the paper's complex q_j and k_j, each [..., d/2] complex128, for unrotated q and k [..., head_dim].

    Feature i is the real part and feature i + d/2 the imaginary part. For CoCA k is the T projection t, and
    k_j = q_j * u_j, where u_j comes from t (the paper's equations 6 and 7). For other polar forms, q_j and k_j are
    the real magnitudes of the form, one for each term of the score. They do not include the constant angles.
    """
    if method.name in POLAR and method.form.magnitude is not None:
        rotated = q[..., : method.rotary_dim].double(), k[..., : method.rotary_dim].double()
        m, u = (_terms(x, method) for x in (method.form.magnitude(rotated[0]), method.form.kept(rotated[1])))
        return torch.complex(m, torch.zeros_like(m)), torch.complex(u, torch.zeros_like(u))

    def complex_pairs(x: Tensor) -> Tensor:
        real, imaginary = x[..., : method.rotary_dim].double().chunk(2, dim=-1)
        return torch.complex(real.contiguous(), imaginary.contiguous())

    queries, block = complex_pairs(q), k[..., : method.rotary_dim].double()
    u = method.form.kept(block)
    if u.shape == block.shape:  # u contains the keys, not one coefficient per pair of features
        return queries, complex_pairs(k)
    return queries, torch.complex(queries.real * u, queries.imag * u)


def _terms(x: Tensor, method: PositionMethod) -> Tensor:
    """Repeat magnitudes that two frequencies share, so that each term of the score has its own magnitude."""
    frequencies = method.rotary.dim // 2 if method.rotary is not None else 0
    return torch.cat((x, x), dim=-1) if x.shape[-1] < frequencies else x


def initial_angles(method: PositionMethod, q: Tensor, k: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return the initial angles Theta_j of token pairs, [..., d/2] float64 in (-pi, pi]; NaN if q_j or k_j is zero.

    `q` and `k` [..., heads, pairs, head_dim] are unrotated. The form's constant angle is added to each angle. If the
    layer has an `offset` [heads, number of magnitudes], the offset is subtracted instead.
    """
    queries, keys = planar(method, q, k)
    product = queries * keys.conj()
    constant: Tensor | float = method.form.angle if offset is None else -offset.double()[:, None]
    turned = product.angle() if isinstance(constant, float) and not constant else _wrapped(product.angle() + constant)
    angle = torch.where(product.real.eq(0) & product.imag.eq(0), math.nan, turned)
    return torch.where(angle.le(-math.pi), math.pi, angle)


def _wrapped(angle: Tensor) -> Tensor:
    """Return the same angles in [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


def rotary_frequencies(encoding: PositionEncoding, length: int) -> Tensor:
    """Return a rotary method's theta_j at an input length: [d/2] float64 on the CPU, in radians per token."""
    rotary, clex = encoding.method.rotary, encoding.clex
    assert rotary is not None
    inverse = rotary.inverse_frequencies(length) if clex is None else clex.inverse_frequencies(clex.factor_for(length))
    return inverse.detach().cpu()


def rotated_distances(bands: tuple[Band, ...], last: Tensor, keys: Tensor) -> Tensor:
    """Return the distance between a query at position `last` [1] and each key position in `keys`, in float64.

    The method's distance map has been applied to the distances.
    """
    relative = torch.zeros_like(keys)
    for band in bands:
        distance = mapped(last, keys[:1], band.query_positions) - mapped(keys, keys[:1], band.key_positions)
        relative = torch.where(in_band(replace(band, first_keys=None), last - keys, keys), distance, relative)
    return relative


@dataclass(frozen=True)
class SweptScores:
    """Scores of token pairs at all distances of a sweep, on the CPU."""

    scores: Tensor  # [pairs, heads, distances] float64, from the rotated features, or from all if none is rotated
    visible: Tensor  # [distances] bool: whether a key at that distance is visible


class DistanceSweep:
    """Scores of token pairs at each of the ascending `distances`, as they would be in an input of `length` tokens."""

    def __init__(self, encoding: PositionEncoding, distances: list[int], length: int, device: torch.device) -> None:
        self.method: PositionMethod = encoding.method
        ascending = torch.tensor(distances, device=device)
        self.keys = distances[-1] - ascending.flip(0)  # positions of the keys, ascending as in a sequence
        self.last = torch.tensor([distances[-1]], device=device)  # the position of the query
        self.frame = encoding(self.last, length, torch.float64, key_positions=self.keys)

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        bias: DistanceBias | None,
        factor: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> SweptScores:
        """Return the scores of unrotated q and k [pairs, heads, head_dim].

        Scores include the layer's bias, its learned `factor` [heads] or [heads, 2] and its constant angles `offset`
        [heads, number of magnitudes]. They do not include forgetting gates, which depend on the tokens between the
        query and the key.
        """
        q, k = q.double(), k.double()
        everywhere = k[:, :, None].expand(-1, -1, len(self.keys), -1)
        of_layer: dict[str, Any] = {"bias": bias, "factor": factor, "offset": offset}
        inputs = expanded(self.method.prepare(q[:, :, None], everywhere, everywhere, self.frame, **of_layer))
        width = self.method.form.operand_features * self.method.rotary_dim or self.method.head_dim
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
        return SweptScores(scores.flip(-1).cpu(), visible.flip(0).cpu())
