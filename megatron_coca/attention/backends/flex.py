"""PyTorch's FlexAttention: bands, documents and biases inside a compiled CUDA kernel, computed in float32."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_coca.attention.inputs import AttentionInputs, Band, DistanceBias, Needs


class FlexBackend:
    """FlexAttention of one segment. `compiled=False` runs its dense definition, which any device can (for tests)."""

    def __init__(self, compiled: bool = True) -> None:
        self._compiled = compiled

    def supports(self, needs: Needs) -> str | None:
        """None, or why such a model cannot be served."""
        if needs.device_type != "cuda":
            return "its compiled kernel has no backward pass off CUDA"
        if len(needs.bands) > 1:
            return "FlexAttention takes one query and one key operand, not one pair for each band"
        if needs.dropout > 0:
            return "FlexAttention has no dropout"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype."""
        (segment,) = inputs.segments
        kernel: Any = _compiled_kernel() if self._compiled else flex_attention
        return kernel(
            segment.query,
            segment.key,
            inputs.value,
            score_mod=None if inputs.bias is None else _score_mod(inputs.bias, inputs.past),
            block_mask=_block_mask(inputs, segment.band),
            scale=inputs.scale,
            enable_gqa=segment.query.shape[1] != segment.key.shape[1],
        )


@lru_cache(maxsize=1)
def _compiled_kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(inputs: AttentionInputs, band: Band) -> BlockMask:
    query_length, key_length = inputs.query.shape[2], inputs.value.shape[2]
    if inputs.documents is None:
        return _band_mask(query_length, key_length, band, inputs.value.device)
    starts = inputs.documents.starts
    rule = _visible(band, key_length - query_length, starts)
    return create_block_mask(rule, len(starts), None, query_length, key_length, device=starts.device)


@lru_cache(maxsize=16)
def _band_mask(query_length: int, key_length: int, band: Band, device: torch.device) -> BlockMask:
    rule = _visible(band, key_length - query_length, None)
    return create_block_mask(rule, None, None, query_length, key_length, device=device)


def _visible(band: Band, past: int, starts: Tensor | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + past - key
        first = torch.zeros_like(query) if starts is None else starts[batch, query + past]
        inside = (distance >= band.low) & (key >= first)
        if band.high is not None:
            inside = inside & (distance < band.high)
        return inside if band.first_keys is None else inside & (key < first + band.first_keys)

    return rule


def _score_mod(bias: DistanceBias, past: int) -> Callable[..., Tensor]:
    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias.at((query + past - key).clamp(min=0).to(torch.float32))[head]

    return add
