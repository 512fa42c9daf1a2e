"""Decoding one token with fixed shapes, so that every token runs the same operations and a CUDA graph can repeat them.

The token's index is a tensor on the device. The token's keys and values are written to one slot in the buffers of the
cache. Attention covers all slots up to `TokenStep.extent`. Slots that the token does not see are masked.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.backends.reference import gate_bias, visible, widened, with_sinks
from megatron_coca.attention.inputs import PAIRWISE, AttentionInputs, Backend, Band, DistanceBias, bias_of_pairs
from megatron_coca.attention.layer import LayerCache
from megatron_coca.attention.method import PositionMethod

HIDDEN = -1
"""The segment number of slots that the token does not see."""


@dataclass(frozen=True)
class TokenStep:
    """One decoded token, for all layers.

    Attributes:
        index: the token's index, int64 [1], on the device.
        extent: number of slots that layers without a window read; greater than the token's index.
        kernel: whether attention runs in the Triton kernel instead of PyTorch operations.
        shared: results that several layers use in this step.
    """

    index: Tensor
    extent: int
    kernel: bool = False
    shared: dict[Hashable, Any] = field(default_factory=dict)


class StaticLayer:
    """The cache of one layer in buffers that stay in place. It has the methods of `LayerCache` that layers call.

    Layers with a window use their buffers as a ring: a new token replaces the oldest one.
    """

    def __init__(
        self,
        layer: LayerCache,
        method: PositionMethod,
        total: int,
        shared_bias: DistanceBias | None,
        tables: dict[Hashable, Tensor],
    ) -> None:
        """`total` is the largest number of tokens of the sequence. `shared_bias` is the bias of all layers with this
        method, if any. All layers share `tables`, in which this class stores the values of biases.
        """
        layer.hold(total)
        self._layer, self._method, self._total = layer, method, total
        self._shared_bias, self._tables = shared_bias, tables
        self.step: TokenStep | None = None

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers, [batch, kv_heads, slots, width]."""
        return self._layer.buffers

    def append(self, *new: Tensor) -> list[Tensor]:
        """Write the tensors [batch, kv_heads, 1, width] of the step's token, and return all slots up to the extent."""
        slot = self._once("slot", lambda: (self._current.index - self._layer.first) % self._slots)
        for buffer, x in zip(self.buffers, new, strict=True):
            buffer.index_copy_(2, slot, x)
        return [buffer[:, :, : self._extent] for buffer in self.buffers]

    def attend(self, backend: Backend, inputs: AttentionInputs) -> Tensor:
        """Compute the attention of the step's token, [batch, heads, 1, width of V]. The keys of `inputs` are the slots.
        `backend` is not used, because it computes several tokens at a time.
        """
        bands = tuple(segment.band for segment in inputs.segments)
        segments = self._once((bands, self._method.chunk), lambda: self._segment_of_slots(bands))
        along = None if inputs.bias is None else self._bias(inputs.bias, inputs.query)
        if inputs.gates is not None:
            gates = gate_bias(inputs.gates, self._current.index)[:, :, 0]
            along = gates if along is None else along + gates
        out = _by_kernel(inputs, segments, along, self._current.index) if self._current.kernel else None
        return attend_token(inputs, segments, along) if out is None else out

    @property
    def _current(self) -> TokenStep:
        assert self.step is not None
        return self.step

    @property
    def _slots(self) -> int:
        return self.buffers[0].shape[2]

    @property
    def _extent(self) -> int:
        return self._slots if self._layer.window is not None else min(self._current.extent, self._slots)

    def _once(self, key: Hashable, compute: Any) -> Any:
        """Return `compute()`, computed once in a step for all layers with the same slots."""
        shared, key = self._current.shared, (key, self._layer.first, self._slots, self._extent)
        if key not in shared:
            shared[key] = compute()
        return shared[key]

    def _distance(self) -> Tensor:
        """Return the distance of every slot's token, int64 [extent]; it is negative for slots without a token."""
        index, first = self._current.index, self._layer.first
        slot = torch.arange(self._extent, device=index.device)
        if self._layer.window is None:
            return index - slot
        distance = (index - first - slot) % self._slots
        return torch.where(index - distance < first, HIDDEN, distance)

    def _segment_of_slots(self, bands: tuple[Band, ...]) -> Tensor:
        """Return the number of the segment that scores each slot, int32 [extent], or HIDDEN."""
        distance = self._once("distance", self._distance)
        key, first = self._current.index - distance, self._document()
        found = torch.full_like(distance, HIDDEN, dtype=torch.int32)
        for number, band in enumerate(bands):
            found = found.masked_fill(visible(band, distance, key, first), number)
        return found

    def _document(self) -> Tensor:
        """Return the index of the first token of the token's chunk, or 0 without chunks, int64 [1]."""
        m, chunk = self._current.index, self._method.chunk
        return torch.zeros_like(m) if chunk is None else m - m % chunk

    def _bias(self, bias: DistanceBias, query: Tensor) -> Tensor:
        """Return the bias of every slot, [heads, extent] in float32 or better. The values of hidden slots are finite
        but have no meaning.

        If a bias depends only on the distance, the first step computes its values for all distances, and later steps
        look them up.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        distance = self._once("distance", self._distance).clamp(min=0)
        if bias.formula in PAIRWISE:
            return bias_of_pairs(bias, distance.to(wide), (self._current.index - self._document()).to(wide))
        key = id(bias) if bias is self._shared_bias else id(self)
        if key not in self._tables:
            self._tables[key] = bias.at(torch.arange(self._total, dtype=wide, device=query.device))
        return self._once(("bias", key), lambda: self._tables[key].index_select(1, distance))


def attend_token(inputs: AttentionInputs, segments: Tensor, along: Tensor | None) -> Tensor:
    """Compute attention of one query with PyTorch operations, in float32 or better: [batch, heads, 1, width of V] in
    the query's dtype.

    Args:
        segments: the number of the segment that scores each key, integer [keys]; a negative number hides the key.
        along: a bias of every key, [heads, keys] or [batch, heads, keys], or None.
    """
    dtype, inputs = inputs.query.dtype, widened(inputs)
    kv_heads = inputs.value.shape[1]
    scores = torch.full((), -torch.inf, dtype=inputs.query.dtype, device=inputs.query.device)
    for number, segment in enumerate(inputs.segments):
        query = segment.query.reshape(len(segment.query), kv_heads, -1, segment.query.shape[3])
        product = query @ segment.key.transpose(2, 3) * inputs.scale  # [batch, kv_heads, group, keys]
        if inputs.softcap is not None:
            product = inputs.softcap * torch.tanh(product / inputs.softcap)
        scores = torch.where(segments == number, product, scores)
    scores = scores.flatten(1, 2)[:, :, None]
    if along is not None:
        scores = scores + along.to(scores.dtype)[..., None, :]
    weights = with_sinks(scores, inputs.sinks).softmax(dim=-1)[..., : inputs.value.shape[2]]
    grouped = weights.reshape(len(weights), kv_heads, -1, weights.shape[3])
    return (grouped @ inputs.value).flatten(1, 2)[:, :, None].to(dtype)


def _by_kernel(inputs: AttentionInputs, segments: Tensor, along: Tensor | None, index: Tensor) -> Tensor | None:
    """Compute `attend_token` in the Triton kernel, or return None if the kernel does not support the operands."""
    # Imported here because triton exists only on some platforms, and the PyTorch operations work without it.
    from megatron_coca.kernels.token_attention import token_attention, unsupported

    operands = [(segment.query, segment.key) for segment in inputs.segments]
    if unsupported(operands, inputs.value) is not None:
        return None
    return token_attention(operands, inputs.value, inputs.scale, segments, along, index, inputs.softcap, inputs.sinks)
