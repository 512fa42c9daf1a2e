"""PyTorch's FlexAttention: a bias as a formula inside a compiled CUDA kernel, computed in float32."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron_coca.attention.inputs import AttentionInputs, DistanceBias, Needs


class FlexBackend:
    """FlexAttention with a causal block mask. `compiled=False` runs its dense definition, which any device can (for
    tests).
    """

    def __init__(self, compiled: bool = True) -> None:
        self._compiled = compiled

    def supports(self, needs: Needs) -> str | None:
        """None, or why such a model cannot be served."""
        if needs.device_type != "cuda":
            return "its compiled kernel has no backward pass off CUDA"
        if needs.dropout > 0:
            return "FlexAttention has no dropout"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype."""
        query_length, key_length = inputs.query.shape[2], inputs.key.shape[2]
        past = key_length - query_length
        kernel: Any = _compiled_kernel() if self._compiled else flex_attention
        return kernel(
            inputs.query,
            inputs.key,
            inputs.value,
            score_mod=None if inputs.bias is None else _score_mod(inputs.bias, past),
            block_mask=_causal_mask(query_length, key_length, inputs.query.device),
            scale=inputs.scale,
            enable_gqa=inputs.query.shape[1] != inputs.key.shape[1],
        )


@lru_cache(maxsize=1)
def _compiled_kernel() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@lru_cache(maxsize=16)
def _causal_mask(query_length: int, key_length: int, device: torch.device) -> BlockMask:
    past = key_length - query_length

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query + past >= key

    return create_block_mask(visible, None, None, query_length, key_length, device=device)


def _score_mod(bias: DistanceBias, past: int) -> Callable[..., Tensor]:
    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias.at((query + past - key).to(torch.float32))[head]

    return add
