"""Inspection of a model's attention: backend inputs, and the scores and weights of every layer and head."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.backends.reference import gate_bias, with_sinks
from megatron_coca.attention.inputs import AttentionInputs, Band, bias_of_pairs, expanded
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod
from megatron_coca.model.layers import soft_capped

Visit = Callable[[Tensor, Tensor, AttentionInputs], None]
"""A callback that receives one layer's q [batch, heads, length, head_dim] and k [batch, kv_heads, length, head_dim]
before rotation, and the inputs of the layer's backend. With CoCA, k is the T projection."""


@contextmanager
def observed(model: nn.Module, visit: Visit, of: PositionMethod | None = None) -> Iterator[None]:
    """In this context, call `visit` for each attention layer in turn during every forward pass without a cache.

    With `of`, skip the layers that have another position method. Only one layer's tensors are in memory at a time,
    unless `visit` keeps them.
    """
    found = (module for module in model.modules() if isinstance(module, SelfAttention))
    layers = [layer for layer in found if of is None or layer.method is of]
    methods = [layer.method for layer in layers]

    def observing(method: PositionMethod) -> Any:
        def prepare(q: Tensor, k: Tensor, *rest: Any, **of_layer: Any) -> AttentionInputs:
            inputs = method.prepare(q, k, *rest, **of_layer)
            visit(q, k, expanded(inputs))
            return inputs

        return SimpleNamespace(prepare=prepare)

    try:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = observing(method)
        yield
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method


class AttentionMap(NamedTuple):
    """Attention scores of one layer, and the weights that are their softmax: [batch, heads, length, length] each.

    Scores are scaled and soft-capped, and they include the bias. The score of a hidden key is -inf. Each row of weights
    sums to 1, or to less than 1 in a layer with attention sinks.
    """

    scores: Tensor
    weights: Tensor


def attention_maps(model: nn.Module, *inputs: Any, **options: Any) -> list[AttentionMap]:
    """Run `model(*inputs, **options)` without gradients and return the map of every attention layer, in call order.

    `model` may be any module that contains a `SelfAttention`. Memory grows with the square of the length.
    """
    found: list[AttentionMap] = []

    def visit(q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
        length = inputs.value.shape[2]
        scores = row_scores(inputs, torch.arange(length))
        weights = with_sinks(scores, inputs.sinks).softmax(dim=-1)
        found.append(AttentionMap(scores, weights[..., :length]))

    with torch.no_grad(), observed(model, visit):
        model(*inputs, **options)
    return found


def in_band(band: Band, distance: Tensor, keys: Tensor) -> Tensor:
    """Return a mask that is True for each key inside the band of its query.

    `keys` are the positions of the keys. Each query is `distance` positions after its key.
    """
    apart = band.apart(keys + distance, keys)
    inside = (distance >= 0) & (apart >= band.low)
    inside = inside if band.high is None else inside & (apart < band.high)
    return inside if band.first_keys is None else inside & (keys < band.first_keys)


def row_scores(inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Return the attention scores of the queries at token indices `queries` [n] with all keys.

    The scores are those that `AttentionMap` describes: [batch, heads, n, length], in float32 or float64.
    """
    queries = queries.to(inputs.value.device)
    key = torch.arange(inputs.value.shape[2], device=queries.device)
    first = key.new_zeros(1) if inputs.documents is None else inputs.documents.starts[:, None, queries, None]
    distance = queries[:, None] - key
    wide = torch.promote_types(inputs.value.dtype, torch.float32)
    scores = torch.tensor(-math.inf, dtype=wide, device=queries.device)
    for segment in inputs.segments:
        visible = in_band(segment.band, distance, key - first) & (key >= first)
        grouped = segment.query[:, :, queries].to(wide).unflatten(1, (segment.key.shape[1], -1))
        product = torch.einsum("bghmd,bgnd->bghmn", grouped, segment.key.to(wide)).flatten(1, 2) * inputs.scale
        scores = torch.where(visible, soft_capped(product, inputs.softcap), scores)
    if inputs.bias is not None:
        counted = (queries[:, None] - (first if inputs.documents is None else first[:, 0])).to(wide)
        bias = bias_of_pairs(inputs.bias, distance.clamp(min=0).to(wide), counted)
        scores = scores + (bias.transpose(0, 1) if bias.dim() == 4 else bias)
    return scores if inputs.gates is None else scores + gate_bias(inputs.gates, queries).to(wide)
