"""Position methods: score form, frequency extension, distance map, logit scaling and bias, chosen independently."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import (
    PositionContext,
    RotaryFrequencies,
    SegmentTables,
    ShardedModule,
    TokenPositions,
    column,
    segment_tables,
)
from megatron_coca.attention.inputs import (
    AttentionInputs,
    Backend,
    BackendError,
    DistanceBias,
    Needs,
    PackedDocuments,
    Segment,
    Turns,
    gate_features,
    in_chunks,
    made_once,
)
from megatron_coca.attention.positions.bias import BiasSource, HeadWeights, LearnedBias
from megatron_coca.attention.positions.clex import Clex
from megatron_coca.attention.positions.distance_maps import UNMAPPED, Band
from megatron_coca.attention.positions.forms import ScoreForm, magnitude_tables
from megatron_coca.attention.positions.frequencies import Rotary
from megatron_coca.attention.positions.gates import HeadGates
from megatron_coca.attention.positions.logit_scalings import LogitFactors
from megatron_coca.attention.positions.offsets import HeadOffsets
from megatron_coca.kernels import missing_triton

Tables = tuple[SegmentTables, ...]

WIDEST_MAGNITUDES = 128
"""The largest number of magnitudes per head from which the Triton kernels compute Q' and K'. More would not fit in the
registers.
"""


class OperandMaker(Protocol):
    """Computes Q' and K' of every segment from q [batch, heads, length, head_dim] and k [batch, kv_heads, length,
    head_dim]. Q' and K' have the shapes of q and k, except for their width, which the form determines.
    """

    def __call__(
        self,
        form: ScoreForm,
        q: Tensor,
        k: Tensor,
        segments: Tables,
        factor: Tensor | None,
        offset: Tensor | None = None,
    ) -> list[Tensor]: ...


def with_torch(
    form: ScoreForm, q: Tensor, k: Tensor, segments: Tables, factor: Tensor | None, offset: Tensor | None = None
) -> list[Tensor]:
    """Compute the operands by the formulas in `positions.forms`."""
    made = (
        (form.query_operand(q, tables.query, factor, offset), form.key_operand(k, tables.key)) for tables in segments
    )
    return [operand for pair in made for operand in pair]


def with_triton(
    form: ScoreForm, q: Tensor, k: Tensor, segments: Tables, factor: Tensor | None, offset: Tensor | None = None
) -> list[Tensor]:
    """Compute the operands of a rotary form in one fused kernel, in float32 with one rounding. Only the arguments are
    saved for the backward pass. If no segment has tables, the form does not rotate, and PyTorch operations compute the
    operands.

    Raises:
        ValueError: the kernel does not support the form or these tensors.
    """
    pairs = [pair for tables in segments for pair in (tables.query, tables.key) if pair is not None]
    if not pairs:
        return with_torch(form, q, k, segments, factor)
    if not form.fused:
        raise ValueError("operand_kernel: triton does not support this score form; set operand_kernel: torch")
    if factor is not None and form.features * pairs[0].cos.shape[-1] < q.shape[-1]:
        raise ValueError(
            "operand_kernel: triton does not support logit scaling of unrotated features; set operand_kernel to torch"
        )
    flat = [table for pair in pairs for table in pair]
    if offset is None:
        offset = form.constant_offset(q.shape[1], pairs[0])
    # Imported here because triton exists only on some platforms, and everything else must work without it.
    if form.kernel is not None and offset is None:
        from megatron_coca.kernels.operands import fused_operands

        return fused_operands(q, k, flat, form.kernel)
    from megatron_coca.kernels.polar_operands import Terms, polar_operands

    assert form.polar is not None
    return polar_operands(q, k, flat, Terms(*form.polar, form.features), offset)


def automatic(
    form: ScoreForm, q: Tensor, k: Tensor, segments: Tables, factor: Tensor | None, offset: Tensor | None = None
) -> list[Tensor]:
    """Use the fused kernel for the forms that it supports on CUDA, and PyTorch operations for everything else."""
    query = segments[0].query
    if query is None or not form.fused or not q.is_cuda:
        return with_torch(form, q, k, segments, factor, offset)
    learned = query.cos.requires_grad  # true for clex
    partly_scaled = factor is not None and form.features * query.cos.shape[-1] < q.shape[-1]
    served = q.dtype != torch.float64 and not learned and not partly_scaled
    return (with_triton if served else with_torch)(form, q, k, segments, factor, offset)


OPERAND_MAKERS: dict[str, OperandMaker] = {"auto": automatic, "torch": with_torch, "triton": with_triton}
"""Functions that compute operands, by `operand_kernel`."""


def operand_maker(name: str) -> OperandMaker:
    """Return the function for `operand_kernel: name`. Only these functions rotate queries and keys; backends receive
    the rotated operands.
    """
    unusable = name == "auto" and (not torch.cuda.is_available() or missing_triton("cuda") is not None)
    return with_torch if unusable else OPERAND_MAKERS[name]


def check_kernel(key: str, name: str, device_type: str) -> None:
    """Check that the kernel set by `key: name` (`operand_kernel` or `loss_kernel`) runs on this type of device.

    Raises:
        BackendError: the kernel does not run on this type of device.
    """
    reason = missing_triton(device_type) if name == "triton" else None
    if reason is not None:
        raise BackendError(f"{key}: triton cannot compute this model ({reason}); set {key}: torch")


@dataclass(frozen=True)
class LatentWidths:
    """Numbers of features in latent attention.

    Attributes:
        rank: features of the latent of keys and values.
        unrotated: features of every query and key in addition to the `head_dim` features on which the position method
            acts.
        value: features of every value.
    """

    rank: int
    unrotated: int
    value: int


@dataclass(frozen=True)
class PositionMethod:
    """The position method of a model's attention.

    Attributes:
        name: the value of `pos_emb`.
        form: the score form, which turns queries and keys into operands.
        rotary: the rotary frequencies, or None for non-rotary forms.
        num_heads: number of query heads.
        head_dim: features per head.
        training_length: training length in tokens, for logit scaling; frequencies use `Rotary.original_length`.
        bias: the score bias.
        clex: function that builds the network for learned frequencies, or None.
        bands, trained_bands: the relative-position map in evaluation and in training.
        logit_scaling: function from a query's position to a factor on its logits, or None.
        scales_training: whether logit scaling also applies in training.
        operands: function that computes Q' and K' of every segment.
        softmax_scale: factor on the dot products, or None for 1 / sqrt(head_dim).
        softcap: bound of the scores, or None (see `AttentionInputs`).
        sinks: whether every layer learns sink logits.
        chunk: chunk length in tokens if queries attend only within their chunk, or None.
        initial_factor: initial value of the learned factor that each head applies to its logits, or None.
        factor_bias: whether a learned bias is added to the product of the learned factor and the logit scaling.
        gates: function that builds a layer's module of forgetting gates, or None.
        offsets: function that builds a layer's module of constant angles, or None.
        queries_per_key: number of query heads per key head.
        norms_rotated: whether layers normalise Q' and K'.
        magnitudes: whether the backend receives magnitudes instead of Q' and K' (see `with_backend`).
        latent: the widths of latent attention, in which all heads share the key of the position method, or None.
    """

    name: str
    form: ScoreForm
    rotary: Rotary | None
    num_heads: int
    head_dim: int
    training_length: int
    bias: BiasSource = field(default_factory=BiasSource)
    clex: Callable[[], Clex] | None = None
    bands: tuple[Band, ...] = UNMAPPED
    trained_bands: tuple[Band, ...] = UNMAPPED
    logit_scaling: LogitFactors | None = None
    scales_training: bool = True
    operands: OperandMaker = with_torch
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    chunk: int | None = None
    initial_factor: float | None = None
    factor_bias: bool = False
    gates: Callable[[], HeadGates] | None = None
    offsets: Callable[[], HeadOffsets] | None = None
    queries_per_key: int = 1
    norms_rotated: bool = False
    magnitudes: bool = False
    latent: LatentWidths | None = None

    def with_backend(self, backend: Backend) -> "PositionMethod":
        """Return the method for a model with this backend: polar forms pass magnitudes to backends that expand them."""
        possible = self.form.by_magnitudes and self.gates is None and self.latent is None
        single = len(self.bands) == len(self.trained_bands) == 1 and self.head_dim <= WIDEST_MAGNITUDES
        return replace(self, magnitudes=possible and single and getattr(backend, "expands", False))

    @property
    def scale(self) -> float:
        """Factor on the dot products; by default 1 / sqrt(features of a query) (Vaswani et al. 2017, section 3.2.1),
        times the factor of the frequency extension on all logits.
        """
        scale = 1.0 / math.sqrt(self.head_dim + self.unrotated) if self.softmax_scale is None else self.softmax_scale
        return scale if self.rotary is None else scale * self.rotary.logit_factor

    @property
    def unrotated(self) -> int:
        """Number of features of every query and key in addition to `head_dim`. No form changes these features."""
        return 0 if self.latent is None else self.latent.unrotated

    @property
    def rotary_dim(self) -> int:
        """Number of rotated features per head."""
        return self.form.features * (self.rotary.dim // 2) if self.rotary is not None else 0

    @property
    def operand_dim(self) -> int:
        """Number of features per head of Q' and K'."""
        return self.form.operand_width(self.head_dim, self.rotary_dim) + self.unrotated

    def keys_stay(self, length: int | None) -> bool:
        """Return whether a token's K' does not change while the sequence grows, so that K' can be cached. `length` is
        the fixed length for length-dependent frequencies, or None if the length grows with the sequence.

        The result is False for magnitudes, which are cached without their angles. It is also False for latent attention
        with rotation, which caches the shared key before the rotation. Every distance map then needs only one cached
        key per token.
        """
        if self.latent is not None:
            return self.rotary is None
        by_length = self.clex is not None or (self.rotary is not None and self.rotary.depends_on_length)
        return not self.form.decay and not self.magnitudes and (length is not None or not by_length)

    def moving(self, length: int | None) -> str | None:
        """Return None if decoding with fixed shapes (`attention/static_cache.py`) supports the method, or the reason
        why not. See `keys_stay` for `length`.
        """
        if self.form.decay:
            return "the factors of all keys change with the number of tokens"
        if self.magnitudes:
            return "the attention kernel rotates all keys again for every token"
        if not self.keys_stay(length) and self.window is not None:
            return "keys that are rotated again need the order of the tokens, which a window's buffers do not keep"
        if self.gates is not None and self.window is not None:
            return "forgetting gates need the order of the tokens, which a window's buffers do not keep"
        return None

    @property
    def switch(self) -> int | None:
        """The length beyond which the frequencies switch once, or None if they never do. All longer lengths use the
        same frequencies.
        """
        switches = self.rotary is not None and self.rotary.scaling.declaration.switches
        return self.rotary.original_length if self.rotary is not None and switches else None

    @property
    def window(self) -> int | None:
        """Number of tokens that a query sees, including its own, or None for all. A cache keeps only these tokens."""
        (band, *others) = self.bands
        return band.high if not others and band.chunk is None else None

    def layer_bias(self) -> LearnedBias | None:
        """Build the module for one layer's own bias, or return None."""
        return self.bias.by_layer() if self.bias.by_layer is not None else None

    def layer_sinks(self) -> HeadWeights | None:
        """Build the module for one layer's sink logits, initially 0, or return None."""
        return HeadWeights(self.num_heads, 0.0) if self.sinks else None

    def layer_factor(self) -> HeadWeights | None:
        """Build the module for one layer's learned logit factors, or return None."""
        return (
            None if self.initial_factor is None else HeadWeights(self.num_heads, self.initial_factor, self.factor_bias)
        )

    def layer_gates(self) -> HeadGates | None:
        """Build the module for one layer's forgetting gates, or return None."""
        return None if self.gates is None else self.gates()

    def layer_offsets(self) -> HeadOffsets | None:
        """Build the module for one layer's constant angles, or return None."""
        return None if self.offsets is None else self.offsets()

    def learned(self) -> list[Callable[[], nn.Module | None]]:
        """Return the functions that build the learned modules of one layer."""
        return [self.layer_bias, self.layer_sinks, self.layer_factor, self.layer_gates, self.layer_offsets]

    def needs(self, device_type: str, dropout: float, training: bool = True) -> Needs:
        """Return the requirements on a backend, for evaluation and, if `training`, also for training."""
        bands = max(self.bands, self.trained_bands, key=len) if training else self.bands
        head_dim = self.operand_dim + (0 if self.gates is None else gate_features(self.queries_per_key))
        return Needs(
            *(device_type, head_dim, self.bias.formula, bands, dropout if training else 0.0),
            softcap=self.softcap,
            sinks=self.sinks,
            packed=self.chunk is not None,
            gates=self.gates is not None,
        )

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PositionContext,
        dropout: float = 0.0,
        bias: DistanceBias | None = None,
        factor: Tensor | None = None,
        sinks: Tensor | None = None,
        gates: Tensor | None = None,
        offset: Tensor | None = None,
        norms: tuple[nn.Module, nn.Module] | None = None,
        seen: Tensor | None = None,
        unrotated: tuple[Tensor, Tensor] | None = None,
    ) -> AttentionInputs:
        """Compute backend inputs from q [batch, heads, length, head_dim], k and v [batch, kv_heads, length, head_dim].

        The layer's own parameters are `bias`, `factor`, `sinks` [heads], `gates` and `offset`, each None if the layer
        has none. `factor` is the factor on the logits, [heads], or the factor and its bias, [heads, 2]. `gates` are the
        log gates of the keys, [batch, heads, length]. `offset` has constant angles, [heads, number of magnitudes].

        `norms` are applied to Q' and K', [..., head_dim]. `seen` has the magnitudes of all keys if they are cached.
        `unrotated` has further features of queries [batch, heads, length, width] and of keys [batch, kv_heads, length,
        width], which the form does not change. With `unrotated`, k may have a single head that all heads share.
        """
        segments = self._segments(q, k, context, offset, seen)
        if unrotated is not None:
            segments = tuple(_with_unrotated(each, *unrotated, context.query_factor) for each in segments)
        if norms is not None:
            of_query, of_key = norms
            segments = tuple(replace(each, query=of_query(each.query), key=of_key(each.key)) for each in segments)
        if factor is not None:
            # Applied to Q', not to q, because the scores of CoCA are quadratic in q.
            scaled = factor.to(torch.promote_types(q.dtype, torch.float32))[:, None, None]
            if context.head_factor is not None:
                scaled = scaled[..., 0] * context.head_factor + scaled[..., 1]
            segments = tuple(replace(each, query=(each.query * scaled).to(each.query.dtype)) for each in segments)
        bias = context.bias if bias is None else bias
        return AttentionInputs(segments, v, self.scale, bias, dropout, context.documents, self.softcap, sinks, gates)

    def _segments(
        self, q: Tensor, k: Tensor, context: PositionContext, offset: Tensor | None, seen: Tensor | None = None
    ) -> tuple[Segment, ...]:
        """Compute the operands of every segment. `seen` has the magnitudes of all keys if they are cached."""
        if not self._as_magnitudes(context):
            made = iter(self.operands(self.form, q, k, context.segments, context.query_factor, offset))
            return tuple(Segment(next(made), next(made), tables.band) for tables in context.segments)
        (tables,), form = context.segments, self.form
        assert tables.query is not None and tables.key is not None
        query = form.query_magnitudes(q, tables.query, context.query_factor)
        key = form.key_magnitudes(k, tables.key) if seen is None else seen
        if offset is None:
            offset = form.constant_offset(q.shape[1], tables.query)
        turns = Turns(magnitude_tables(form, tables.query), magnitude_tables(form, tables.key), offset)
        return (Segment(query, key, tables.band, turns),)

    def _as_magnitudes(self, context: PositionContext) -> bool:
        """Return whether the backend receives magnitudes. The kernel that expands them supports neither learned tables
        nor float64.
        """
        table = context.segments[0].query
        return (
            self.magnitudes and table is not None and table.cos.dtype == torch.float32 and not table.cos.requires_grad
        )

    def prepare_cached(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PositionContext,
        append: Callable[..., list[Tensor]],
        gates: Tensor | None = None,
        **of_layer: Any,
    ) -> AttentionInputs:
        """Compute backend inputs as `prepare` does, for tokens that follow cached tokens.

        `append` adds tensors of the new tokens to the cache, and returns the tensors of all cached tokens. The cache
        has v, log gates and K' of every segment. If the context has the tables of all keys, the cache has k or its
        magnitudes instead of K'. `of_layer` contains `bias`, `factor`, `sinks`, `offset` and `norms` for `prepare`.
        """
        new = [] if gates is None else [gates[..., None]]
        if self._as_magnitudes(context):
            (tables,) = context.segments
            assert tables.key is not None
            keys, values, *seen = append(self.form.key_magnitudes(k, tables.key), v)
            inputs = self.prepare(q, k, values, context, seen=keys, **of_layer)
        elif not context.of_new_keys:
            keys, values, *seen = append(k, v, *new)
            inputs = self.prepare(q, keys, values, context, **of_layer)
        else:
            inputs = self.prepare(q, k, v, context, **of_layer)
            values, *rest = append(v, *(segment.key for segment in inputs.segments), *new)
            rotated, seen = rest[: len(inputs.segments)], rest[len(inputs.segments) :]
            segments = tuple(replace(segment, key=key) for segment, key in zip(inputs.segments, rotated, strict=True))
            inputs = inputs.replace(segments=segments, value=values)
        return inputs.replace(gates=seen[0][..., 0] if seen else None)


def _with_unrotated(segment: Segment, query: Tensor, key: Tensor, factor: Tensor | None) -> Segment:
    """Append features [batch, heads, length, width] to the operands. `factor` is the logit scaling of each query."""
    if factor is not None:
        query = (query.to(factor.dtype) * factor).to(query.dtype)
    shared = segment.key.expand(-1, key.shape[1], -1, -1)
    return replace(segment, query=torch.cat((segment.query, query), -1), key=torch.cat((shared, key), -1))


class PositionEncoding(ShardedModule):
    """Computes the PositionContext that all layers of one type share.

    The learned modules, if the method has any, are `bias` (T5 buckets) and `clex` (the network for CLEX frequencies).
    `others` contains the encodings of the other layer types, by name.
    """

    def __init__(self, method: PositionMethod, others: Mapping[str, PositionMethod] | None = None) -> None:
        super().__init__()
        self.method = method
        self.bias = method.bias.shared() if method.bias.shared is not None else None
        self.clex = method.clex() if method.clex is not None else None
        self.others = nn.ModuleDict({name: PositionEncoding(other) for name, other in (others or {}).items()})

    def forward(
        self,
        positions: Tensor,
        length: int,
        dtype: torch.dtype,
        key_positions: Tensor | None = None,
        documents: PackedDocuments | None = None,
        reached: int | None = None,
        of_new_keys: bool = False,
        batch: int = 1,
    ) -> PositionContext:
        """Compute the context for tokens at `positions` (integer [length] or [batch, length]) and operands of `dtype`.

        Args:
            length: length of the whole sequence, for length-dependent extensions.
            key_positions: positions of all cached and new tokens, if `positions` has only the new ones.
            documents: boundaries of packed documents.
            reached: the largest position + 1, including cached tokens. Without it, xPos makes the host wait for the
                device.
            of_new_keys: compute tables only for the keys at `positions`, because K' of the other keys is cached.
            batch: number of rows, needed only for chunks.
        """
        method, extended = self.method, 1
        if self.clex is not None and self.training:
            extended, positions = self.clex.in_training(positions, length, reached or length)
            reached = None
        elif self.clex is not None:
            extended = self.clex.factor_for(length)
        rotary = self._frequencies(length, extended, positions.device)
        tokens = (positions if key_positions is None else key_positions).shape[-1]
        keys = self._held(_token_positions(positions if key_positions is None else key_positions, documents, reached))
        queries = keys
        if key_positions is not None:
            first = keys.first if keys.first.shape[-1] == 1 else keys.first[..., -positions.shape[-1] :]
            queries = TokenPositions(positions.to(torch.float64), first)
            keys = queries if of_new_keys else keys
        factor: Tensor | None = None
        if method.logit_scaling is not None and (method.scales_training or not self.training):
            factor = method.logit_scaling(queries.positions, method.training_length)
        head_factor: Tensor | None = None
        if factor is not None and method.factor_bias:
            head_factor, factor = column(factor, dtype), None
        bias: DistanceBias | None = None
        if self.bias is not None:
            bias = self.bias.distance_bias()
        elif method.bias.fixed is not None:
            bias = method.bias.fixed.to(positions.device)
        bands = method.trained_bands if self.training else method.bands
        if method.chunk is not None:
            documents = in_chunks(documents, method.chunk, batch, tokens, positions.device)
        return PositionContext(
            tuple(segment_tables(band, queries, keys, rotary, factor, dtype) for band in bands),
            None if factor is None else column(factor, dtype),
            self.share.bias(bias),
            documents,
            of_new_keys,
            head_factor,
            tokens,
        )

    def _held(self, tokens: TokenPositions) -> TokenPositions:
        """Select the tokens whose queries and keys this rank uses in attention."""
        positions, first, reached = tokens.positions, tokens.first, tokens.reached
        held = self.share.held(positions)
        if held is positions:
            return tokens
        if reached is None and self.method.form.decay:  # all ranks need the largest position of all tokens
            reached = int(positions.max()) + 1
        return TokenPositions(held, self.share.held(first) if first.shape[-1] > 1 else first, reached)

    def frequencies(self, length: int, device: torch.device) -> RotaryFrequencies | None:
        """Return the rotary frequencies in evaluation for `length` tokens, or None for non-rotary forms."""
        return self._frequencies(length, 1 if self.clex is None else self.clex.factor_for(length), device)

    def _frequencies(self, length: int, extended: int, device: torch.device) -> RotaryFrequencies | None:
        """Return the frequencies for `length` tokens or, for CLEX, for the extension factor `extended`."""
        rotary, decay = self.method.rotary, self.method.form.decay
        if rotary is None:
            return None
        if self.clex is not None:
            return RotaryFrequencies(self.clex.inverse_frequencies(extended), 1.0, decay)
        measured = length if rotary.depends_on_length else rotary.original_length
        theta, both = _frequencies_on(rotary, measured, device), self.method.norms_rotated
        return RotaryFrequencies(theta, rotary.multiplier(length), decay, both)


def _on_device(rotary: Rotary, length: int, device: torch.device) -> Tensor:
    return rotary.inverse_frequencies(length).to(device)


_frequencies_on = made_once(_on_device, evaluated=8)
"""Frequencies that are copied to the device only once; a copy in every forward pass would make the host wait."""


def _token_positions(positions: Tensor, documents: PackedDocuments | None, reached: int | None) -> TokenPositions:
    positions = positions.to(torch.float64)
    if documents is None:
        return TokenPositions(positions, positions[..., :1], reached)
    first = positions.expand(documents.starts.shape).gather(-1, documents.starts)
    return TokenPositions(positions, first, reached)
