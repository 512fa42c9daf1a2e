"""Values that all layers share in a forward pass: everything that depends on positions but not on hidden states."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Backend, DistanceBias, PackedDocuments
from megatron_coca.attention.positions.distance_maps import Band, MapPositions
from megatron_coca.attention.positions.forms import RotaryTables, check_range, growth, rotary_tables

Bias = TypeVar("Bias", bound=DistanceBias | None)


@dataclass(frozen=True)
class HeadShard:
    """Part `index` of `count` equal parts of the query heads and key heads. The heads of a part are consecutive.

    With this class, a rank computes its own heads over all tokens. In sequence parallelism, a rank has only a slice of
    the tokens; a subclass then overrides the methods that exchange tokens for heads.
    """

    index: int = 0
    count: int = 1

    def bias(self, bias: Bias) -> Bias:
        """Restrict a bias for all heads to this rank's heads."""
        if bias is None or self.count == 1:
            return bias
        return bias.part(self.index, self.count)  # type: ignore[return-value]

    def of_heads(self, x: Tensor) -> Tensor:
        """Select this rank's heads from x [heads, ...]."""
        return x if self.count == 1 else x.chunk(self.count)[self.index]

    def split(self, tokens: Tensor) -> Tensor:
        """Return this rank's slice of tokens [..., length]."""
        return tokens

    def held(self, tokens: Tensor) -> Tensor:
        """Select the tokens whose queries and keys this rank has after `gather`, from `tokens` [..., length]."""
        return tokens

    def gather(self, x: Tensor) -> Tensor:
        """Exchange projections [batch, own length, heads, width] for [batch, length, own heads, width]."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """Invert `gather`."""
        return x

    def attend(self, backend: Backend, inputs: AttentionInputs, length: int) -> Tensor:
        """Compute attention, [batch, heads, tokens, width of V]. The whole sequence has `length` tokens."""
        return backend.attend(inputs)

    def mean(self, loss: Tensor, loss_mask: Tensor | None, length: int) -> Tensor:
        """Convert the mean loss of this rank's tokens to the mean loss of all tokens. Each row has `length` tokens, and
        `loss_mask` [batch, length] marks the tokens that count.
        """
        return loss


WHOLE = HeadShard()
"""The only shard of an unsharded model: all heads and all tokens."""


class ShardedModule(nn.Module):
    """A module that computes one shard of a computation. `assign_shard` sets `share`."""

    share: HeadShard = WHOLE


def assign_shard(module: nn.Module, share: HeadShard) -> None:
    """Set `share` on every `ShardedModule` inside `module`."""
    for child in module.modules():
        if isinstance(child, ShardedModule):
            child.share = share


@dataclass(frozen=True)
class TokenPositions:
    """Positions of tokens.

    Attributes:
        positions: float64 [length] or [batch, length].
        first: for each token, the position of the first token in its document; broadcastable to `positions`.
        reached: the largest position + 1, or None if the host does not know it.
    """

    positions: Tensor
    first: Tensor
    reached: int | None = None


@dataclass(frozen=True)
class RotaryFrequencies:
    """Rotary frequencies at the current length.

    Attributes:
        inverse_frequencies: theta_j, [d/2], in radians per position.
        multiplier: factor on cos and sin, as in Hugging Face. Its square multiplies the logits of rotated features.
        decay: whether queries and keys get xPos's exponential factors.
        both: whether queries and keys are each multiplied by the multiplier. If not, only queries are multiplied, by
            its square. The scores differ only if operands are normalised.
    """

    inverse_frequencies: Tensor
    multiplier: float = 1.0
    decay: bool = False
    both: bool = False

    @property
    def dim(self) -> int:
        """The number of rotated features, d."""
        return 2 * self.inverse_frequencies.shape[-1]


@dataclass(frozen=True)
class SegmentTables:
    """Rotation tables of one segment's queries and keys; None for non-rotary forms."""

    query: RotaryTables | None
    key: RotaryTables | None
    band: Band


@dataclass(frozen=True)
class PositionContext:
    """Values that all layers share in one forward pass.

    Attributes:
        segments: rotation tables of each segment.
        query_factor: logit scaling, [length, 1] or [batch, 1, length, 1], for features that are not rotated, or None.
            For rotated features, the tables already include it.
        bias: the bias shared by all layers, or None.
        documents: boundaries of packed documents, or None.
        of_new_keys: whether the tables cover only the new keys (in decoding).
        head_factor: logit scaling to which every head adds its own bias, in the shape of `query_factor`, or None. The
            tables and `query_factor` do not include it.
        length: number of tokens of the whole sequence; a rank may have only a part of them.
    """

    segments: tuple[SegmentTables, ...]
    query_factor: Tensor | None = None
    bias: DistanceBias | None = None
    documents: PackedDocuments | None = None
    of_new_keys: bool = False
    head_factor: Tensor | None = None
    length: int = 0


def segment_tables(
    band: Band,
    queries: TokenPositions,
    keys: TokenPositions,
    rotary: RotaryFrequencies | None,
    factor: Tensor | None,
    dtype: torch.dtype,
) -> SegmentTables:
    """Compute the tables of one band, including every factor on its scores.

    `factor` [length] or [batch, length] is the logit scaling of each query, or None. This factor and the multiplier are
    applied to the tables, not to q, because every form is linear in its tables, but CoCA is quadratic in q.
    """
    if rotary is None:
        return SegmentTables(None, None, band)
    at_query = mapped(queries.positions, queries.first, band.query_positions)
    at_key = mapped(keys.positions, keys.first, band.key_positions)
    theta = rotary.inverse_frequencies
    if at_query is at_key and factor is None and rotary.multiplier == 1.0 and not rotary.decay:
        tables = rotary_tables(at_query, theta, dtype)
        return SegmentTables(tables, tables, band)
    of_query, of_key = (rotary.multiplier, rotary.multiplier) if rotary.both else (rotary.multiplier**2, 1.0)
    query_scale: Tensor | float = of_query * (1.0 if factor is None else factor[..., None])
    key_scale: Tensor | float = of_key
    if rotary.decay:
        # `reached` avoids reading the maximum from the device, which makes the host wait. Maps preserve the order of
        # positions, so the last position is also the last one after mapping.
        last = float(keys.positions.max()) if keys.reached is None else keys.reached - 1
        last = last if band.chunk is None else min(last, band.chunk - 1)
        furthest = torch.tensor([last], dtype=torch.float64)
        places = (mapped(furthest, torch.zeros_like(furthest), to) for to in (band.key_positions, band.query_positions))
        last_key, last_query = (place.tolist()[0] for place in places)
        centre = last_key / 2
        check_range(max(centre, last_query - centre), dtype)
        query_scale = query_scale * growth(at_query, rotary.dim, centre)
        key_scale = 1.0 / growth(at_key, rotary.dim, centre)
    return SegmentTables(
        rotary_tables(at_query, theta, dtype, query_scale), rotary_tables(at_key, theta, dtype, key_scale), band
    )


def mapped(positions: Tensor, first: Tensor, to: MapPositions | None) -> Tensor:
    """Return the positions to which a band rotates tokens at `positions`. See `TokenPositions` for `first`."""
    return positions if to is None else to(positions, first)


def column(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Reshape a factor [length] to [length, 1], or [batch, length] to [batch, 1, length, 1], in float32 or better."""
    wide = factor.to(torch.promote_types(dtype, torch.float32))[..., None]
    return wide[:, None] if factor.dim() == 2 else wide
