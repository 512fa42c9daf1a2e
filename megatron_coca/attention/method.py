"""A position method: independent choices composed into one `prepare`.

The choices are the score form, the frequency extension, the relative-position map, the logit scaling and the bias;
each is a table in `positions`. Nothing here is a class per combination, and nothing keeps state: the same call gives
the same result at any time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_coca.attention.context import (
    PositionContext,
    RotaryFrequencies,
    SegmentTables,
    ShardedModule,
    TokenPositions,
    band,
    column,
    segment_tables,
)
from megatron_coca.attention.inputs import (
    AttentionInputs,
    BackendError,
    DistanceBias,
    Formula,
    Needs,
    PackedDocuments,
    Segment,
)
from megatron_coca.attention.positions.bias import AlibiBias, LearnedBias
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import UNMAPPED, Part
from megatron_coca.attention.positions.forms import LogitScaling, ScoreForm
from megatron_coca.attention.positions.frequencies import Rotary
from megatron_coca.kernels import missing_compiler


class OperandMaker(Protocol):
    """q [batch, heads, length, head_dim], k [batch, kv_heads, length, head_dim] -> (Q', K') in the same shapes."""

    def __call__(
        self, form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
    ) -> tuple[Tensor, Tensor]: ...


def with_torch(
    form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The formulas as `positions.forms` writes them."""
    return form.query_operand(q, tables.query, factor), form.key_operand(k, tables.key)


def with_triton(
    form: ScoreForm, q: Tensor, k: Tensor, tables: SegmentTables, factor: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One kernel launch, float32 inside, one rounding; backward from q, k and the tables alone.

    Raises:
        ValueError: the form turns nothing, or the kernel cannot serve these tensors.
    """
    # Not at the top: triton exists on some platforms only, and everything else must work without it.
    from megatron_coca.kernels.operands import fused_operands

    if tables.query is None or tables.key is None or form.kernel is None:
        raise ValueError("operand_kernel: triton forms rotated operands, and this method rotates nothing")
    if factor is not None and 2 * tables.query.cos.shape[-1] < q.shape[-1]:
        raise ValueError("operand_kernel: triton has no logit scaling on features that are not rotated")
    return fused_operands(q, k, *tables.query, *tables.key, form.kernel)


OPERAND_MAKERS: dict[str, OperandMaker] = {"torch": with_torch, "triton": with_triton}


def check_operand_kernel(name: str, device_type: str) -> None:
    """Check that the named way to form operands runs on a device.

    Raises:
        BackendError: it does not.
    """
    reason = missing_compiler(device_type) if name == "triton" else None
    if reason is not None:
        raise BackendError(f"operand_kernel triton cannot serve this model: {reason}; set operand_kernel to torch")


@dataclass(frozen=True)
class BiasSource:
    """Where a method's score bias comes from: at most one of three.

    Attributes:
        formula: its kind, or None where there is no bias.
        fixed: the bias itself, where nothing of it is learned.
        shared: makes the module that learns one bias for all layers.
        by_layer: makes the module that learns the bias of one layer.
    """

    formula: Formula | None = None
    fixed: AlibiBias | None = None
    shared: Callable[[], LearnedBias] | None = None
    by_layer: Callable[[], LearnedBias] | None = None


@dataclass(frozen=True)
class PositionMethod:
    """How positions enter the attention of a model.

    Attributes:
        name: the value of `pos_emb`.
        form: how queries and keys become operands.
        rotary: the frequencies, or None where the form turns nothing.
        num_heads: query heads.
        head_dim: features of a head.
        training_length: of the weights in tokens, against which logit scaling measures; the frequencies have a length of
            their own (`Rotary.original_length`).
        bias: where a score bias comes from.
        clex: makes the network that learns the frequencies, or None.
        parts: the relative-position map, one part per band of distances.
        trained_parts: the map in training.
        logit_scaling: factor on a row's logits by its position, or None.
        decay: whether queries grow and keys shrink with their position (xPos).
        operands: forms Q' and K' of one segment.
    """

    name: str
    form: ScoreForm
    rotary: Rotary | None
    num_heads: int
    head_dim: int
    training_length: int
    bias: BiasSource = BiasSource()
    clex: Callable[[], Clex] | None = None
    parts: tuple[Part, ...] = UNMAPPED
    trained_parts: tuple[Part, ...] = UNMAPPED
    logit_scaling: LogitScaling | None = None
    decay: bool = False
    operands: OperandMaker = with_torch

    @property
    def scale(self) -> float:
        """Multiplier of the dot products (Vaswani et al. 2017, section 3.2.1)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def rotary_dim(self) -> int:
        """Rotated features of a head."""
        return self.rotary.dim if self.rotary is not None else 0

    @property
    def cached_width(self) -> int:
        """Features that a cache keeps of each key; the values beside them have `head_dim`."""
        return self.form.cached_width(self.head_dim, self.rotary_dim)

    def layer_bias(self) -> LearnedBias | None:
        """A new module for one layer's own bias, or None where layers have none."""
        return self.bias.by_layer() if self.bias.by_layer is not None else None

    def needs(self, device_type: str, dropout: float, training: bool = True) -> Needs:
        """What a backend must be able to do for this method: in training and in evaluation, or in evaluation alone."""
        parts = max(self.parts, self.trained_parts, key=len) if training else self.parts
        dropout = dropout if training else 0.0
        return Needs(device_type, self.head_dim, self.bias.formula, tuple(map(band, parts)), dropout)

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        frame: PositionContext,
        dropout: float = 0.0,
        bias: DistanceBias | None = None,
    ) -> AttentionInputs:
        """The inputs of a backend from q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim].

        `bias` is the layer's own, where it has one.
        """
        segments = tuple(
            Segment(*self.operands(self.form, q, k, part, frame.query_factor), part.band) for part in frame.segments
        )
        return AttentionInputs(segments, v, self.scale, frame.bias if bias is None else bias, dropout, frame.documents)

    def cached(self, k: Tensor) -> Tensor:
        """What a cache keeps of k [..., head_dim]: [..., cached_width], before any rotation."""
        return self.form.cached(k, self.rotary_dim)

    def prepare_cached(
        self, q: Tensor, cached: Tensor, v: Tensor, frame: PositionContext, bias: DistanceBias | None = None
    ) -> AttentionInputs:
        """As `prepare`, for q the last tokens of a sequence whose keys were kept by `cached`."""
        segments = tuple(
            Segment(
                self.form.query_operand(q, part.query, frame.query_factor),
                self.form.key_operand_of_cached(cached, part.key, self.head_dim),
                part.band,
            )
            for part in frame.segments
        )
        return AttentionInputs(segments, v, self.scale, frame.bias if bias is None else bias)


class PositionEncoding(ShardedModule):
    """Turns positions into the frame that all layers share.

    Learned parts, where the method has them: `bias` (T5 buckets), `clex` (the network behind CLEX's frequencies).
    """

    def __init__(self, method: PositionMethod) -> None:
        super().__init__()
        self.method = method
        self.bias = method.bias.shared() if method.bias.shared is not None else None
        self.clex = method.clex() if method.clex is not None else None

    def forward(
        self,
        positions: Tensor,
        length: int,
        dtype: torch.dtype,
        key_positions: Tensor | None = None,
        documents: PackedDocuments | None = None,
    ) -> PositionContext:
        """The frame of tokens at `positions` ([length] or [batch, length], integer) for operands of `dtype`.

        Args:
            length: that of the whole sequence being scored; extensions that depend on a length look at it.
            key_positions: those of all cached tokens and the present ones, where the present ones are only the last.
            documents: boundaries of packed documents.
        """
        method, drawing = self.method, self.clex is not None and self.training
        spectrum, positions = self._drawn(positions) if drawing else (self._spectrum(length), positions)
        keys = _places(positions if key_positions is None or drawing else key_positions, documents)
        queries = keys if key_positions is None else _places(positions, documents, keys.first)
        factor = method.logit_scaling(queries.positions, method.training_length) if method.logit_scaling else None
        parts = method.trained_parts if self.training else method.parts
        return PositionContext(
            tuple(segment_tables(part, queries, keys, spectrum, factor, dtype) for part in parts),
            None if factor is None else column(factor, dtype),
            self.share.bias(self._shared_bias(positions.device)),
            documents,
        )

    def _shared_bias(self, device: torch.device) -> DistanceBias | None:
        if self.bias is not None:
            return self.bias.distance_bias()
        return self.method.bias.fixed.to(device) if self.method.bias.fixed is not None else None

    def _spectrum(self, length: int) -> RotaryFrequencies | None:
        rotary = self.method.rotary
        if rotary is None:
            return None
        if self.clex is not None:
            return RotaryFrequencies(
                self.clex.inverse_frequencies(self.clex.factor_for(length)), 1.0, self.method.decay
            )
        return RotaryFrequencies(rotary.inverse_frequencies(length), rotary.multiplier(length), self.method.decay)

    def _drawn(self, positions: Tensor) -> tuple[RotaryFrequencies, Tensor]:
        """CLEX in training: a random extension, and random places within the extended length for all rows alike."""
        assert self.clex is not None
        factor, places = self.share.agreed(self.clex.training_draw(positions.shape[-1]), positions.device)
        return RotaryFrequencies(self.clex.inverse_frequencies(factor), 1.0, self.method.decay), places.to(
            positions.device
        )


def _places(positions: Tensor, documents: PackedDocuments | None, first: Tensor | None = None) -> TokenPositions:
    """Places of tokens; `first` is that of all tokens where these are only the last of them."""
    positions = positions.to(torch.float64)
    if first is not None:
        return TokenPositions(positions, first if first.shape[-1] == 1 else first[..., -positions.shape[-1] :])
    if documents is None:
        return TokenPositions(positions, positions[..., :1])
    return TokenPositions(positions, positions.expand(documents.starts.shape).gather(-1, documents.starts))
