"""What all layers of one forward pass share: everything that depends on positions but not on hidden states."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import Band, DistanceBias, PackedDocuments
from megatron_coca.attention.positions.distance_maps import Part
from megatron_coca.attention.positions.forms import RotaryTables, check_range, growth, rotary_tables

Bias = TypeVar("Bias", bound=DistanceBias | None)
Draw = tuple[int, Tensor]
"""What CLEX draws in training: a scaling factor and positions."""


@dataclass(frozen=True)
class HeadShard:
    """Part `index` of `count` equal parts of the query heads and of the key heads, each of consecutive heads.

    A process of this class projects to its own heads, and sees all tokens at every place of the model. Where it sees
    only a stretch of the tokens, a subclass exchanges tokens for heads.
    """

    index: int = 0
    count: int = 1

    def bias(self, bias: Bias) -> Bias:
        """A bias of all heads, narrowed to the own ones."""
        return bias if bias is None or self.count == 1 else bias.part(self.index, self.count)  # type: ignore[return-value]

    def split(self, tokens: Tensor) -> Tensor:
        """The own stretch of tokens [..., length]."""
        return tokens

    def gather(self, x: Tensor) -> Tensor:
        """[batch, own length, heads, width] of the projections -> [batch, length, own heads, width] for attention."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """The way back: [batch, length, own heads, width] -> [batch, own length, heads, width]."""
        return x

    def mean(self, loss: Tensor, loss_mask: Tensor | None) -> Tensor:
        """The mean loss over all tokens, from that over the own stretch; `loss_mask` [batch, length] says which count."""
        return loss

    def agreed(self, draw: Draw, device: torch.device) -> Draw:
        """A random draw that all processes of one sequence have in common; `device` is where they communicate."""
        return draw


WHOLE = HeadShard()
"""All heads and tokens."""


class ShardedModule(nn.Module):
    """A module that does its share of what several processes do together.

    Attributes:
        share: set by `take_share`; all of it by default.
    """

    share: HeadShard = WHOLE


def assign_shard(module: nn.Module, share: HeadShard) -> None:
    """Give every part of `module` that can be shared this share."""
    for part in module.modules():
        if isinstance(part, ShardedModule):
            part.share = share


@dataclass(frozen=True)
class TokenPositions:
    """Where tokens stand: float64 positions [length] or [batch, length], and the position of the first token of each
    one's document, which broadcasts to them.
    """

    positions: Tensor
    first: Tensor


@dataclass(frozen=True)
class RotaryFrequencies:
    """How fast pairs of features turn at the present length.

    Attributes:
        inverse_frequencies: theta_j, [d/2], in radians per position.
        multiplier: what Hugging Face multiplies cos and sin with; logits of rotated features get its square.
        decay: whether queries grow and keys shrink with their position (xPos).
    """

    inverse_frequencies: Tensor
    multiplier: float = 1.0
    decay: bool = False

    @property
    def dim(self) -> int:
        """Rotated features, d."""
        return 2 * self.inverse_frequencies.shape[-1]


@dataclass(frozen=True)
class SegmentTables:
    """Where one segment's queries and keys are rotated to; None for forms that turn nothing."""

    query: RotaryTables | None
    key: RotaryTables | None
    band: Band


@dataclass(frozen=True)
class PositionContext:
    """Shared by the layers.

    Attributes:
        segments: tables by segment.
        query_factor: the logit scaling, [length, 1] or [batch, 1, length, 1], for features that are not rotated (the
            tables carry it for those that are), or None.
        bias: the bias that all layers share, or None.
        documents: boundaries of packed documents, or None.
    """

    segments: tuple[SegmentTables, ...]
    query_factor: Tensor | None = None
    bias: DistanceBias | None = None
    documents: PackedDocuments | None = None


def band(part: Part) -> Band:
    """The distances of a part, in the backends' terms."""
    return Band(part.low, part.high, part.first_keys)


def segment_tables(
    part: Part,
    queries: TokenPositions,
    keys: TokenPositions,
    spectrum: RotaryFrequencies | None,
    factor: Tensor | None,
    dtype: torch.dtype,
) -> SegmentTables:
    """The tables of one part of a relative-position map, with everything that multiplies its scores.

    `factor` [length] or [batch, length] is the logit scaling of each query, or None. It and the multiplier go to the
    query's tables alone: every form is linear in them, while q itself enters CoCA squared.
    """
    if spectrum is None:
        return SegmentTables(None, None, band(part))
    query_places, key_places = part.query(queries.positions, queries.first), part.key(keys.positions, keys.first)
    scaled: Tensor | float = spectrum.multiplier**2 * (1.0 if factor is None else factor[..., None])
    same = query_places is key_places and factor is None and spectrum.multiplier == 1.0 and not spectrum.decay
    if same:
        tables = rotary_tables(query_places, spectrum.inverse_frequencies, dtype)
        return SegmentTables(tables, tables, band(part))
    growing, shrinking = _decay(spectrum, query_places, key_places, dtype)
    return SegmentTables(
        rotary_tables(query_places, spectrum.inverse_frequencies, dtype, scaled * growing),
        rotary_tables(key_places, spectrum.inverse_frequencies, dtype, shrinking),
        band(part),
    )


def _decay(
    spectrum: RotaryFrequencies, query_places: Tensor, key_places: Tensor, dtype: torch.dtype
) -> tuple[Tensor | float, Tensor | float]:
    if not spectrum.decay:
        return 1.0, 1.0
    centre = float(key_places.max()) / 2
    check_range(centre, dtype)
    return growth(query_places, spectrum.dim, centre), 1.0 / growth(key_places, spectrum.dim, centre)


def column(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """[length] -> [length, 1], [batch, length] -> [batch, 1, length, 1], in float32 or better."""
    wide = factor.to(torch.promote_types(dtype, torch.float32))[..., None]
    return wide[:, None] if factor.dim() == 2 else wide
