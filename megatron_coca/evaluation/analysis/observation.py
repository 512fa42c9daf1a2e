"""Scores of some pairs of a layer, as softmax takes them: scaled, with the bias, by the segment that serves the pair."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import PositionContext
from megatron_coca.attention.inputs import AttentionInputs, Segment
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.method import PositionMethod

NEAR = 16
"""Every distance up to this one is looked at."""
PER_OCTAVE = 4
"""Distances beyond, in each doubling."""


def draw_pairs(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Positions m of queries and n <= m of keys, [count] int64 each: `count` different pairs out of all that a causal
    model of `length` tokens scores, every one equally likely; all of them, in random order, where there are no more.
    """
    total = length * (length + 1) // 2
    chosen = np.random.default_rng(seed).choice(total, size=min(count, total), replace=False)
    # Pair number p is in row m where m (m + 1) / 2 <= p; the square root is exact enough to be off by one at most.
    rows = ((np.sqrt(8.0 * chosen + 1) - 1) / 2).astype(np.int64)
    rows += (rows + 1) * (rows + 2) // 2 <= chosen
    rows -= rows * (rows + 1) // 2 > chosen
    return torch.from_numpy(rows), torch.from_numpy(chosen - rows * (rows + 1) // 2)


def spread(first: int, last: int, count: int) -> Tensor:
    """At most `count` different whole numbers from `first` to `last`, evenly spread with both ends, int64."""
    return torch.linspace(first, last, min(count, last - first + 1), dtype=torch.float64).round().long().unique()


def log_distances(length: int) -> list[int]:
    """0, 1, ... up to 16, then four in each doubling, up to length - 1."""
    octaves = max(0.0, np.log2(max(length - 1, 1) / NEAR))
    steps = np.arange(1, int(octaves * PER_OCTAVE) + 1)
    far = np.round(NEAR * 2.0 ** (steps / PER_OCTAVE)).astype(int).tolist()
    return sorted({distance for distance in [*range(NEAR + 1), *far, length - 1] if 0 <= distance < length})


@dataclass(frozen=True)
class Seen:
    """One layer's attention in one forward pass.

    Attributes:
        layer: its number, from 0.
        q: [batch, heads, length, head_dim], before anything is rotated.
        k: [batch, kv_heads, length, head_dim], likewise; for CoCA what the T projection gives.
        inputs: what the backend is given.
    """

    layer: int
    q: Tensor
    k: Tensor
    inputs: AttentionInputs


Visit = Callable[[Seen], None]


class _Watched:
    """A position method that shows what it prepares."""

    def __init__(self, method: PositionMethod, layer: int, visit: Visit) -> None:
        self._method, self._layer, self._visit = method, layer, visit

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, frame: PositionContext, *rest: Any) -> AttentionInputs:
        inputs = self._method.prepare(q, k, v, frame, *rest)
        self._visit(Seen(self._layer, q, k, inputs))
        return inputs


@contextmanager
def observed(model: nn.Module, visit: Visit) -> Iterator[None]:
    """While it lasts, `visit` is called with what every layer of `model` attends with, layer after layer.

    Only one layer's tensors are alive at a time, unless `visit` keeps them. Forward passes without a cache are seen.
    """
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    methods = [layer.method for layer in layers]
    try:
        for index, (layer, method) in enumerate(zip(layers, methods, strict=True)):
            layer.method = _Watched(method, index, visit)  # type: ignore[assignment]
        yield
    finally:
        for layer, method in zip(layers, methods, strict=True):
            layer.method = method


SCORES_AT_ONCE = 1 << 24
"""Numbers held at a time, so that memory does not grow with the square of the length."""


def scores_at(inputs: AttentionInputs, queries: Tensor, distance: int) -> Tensor:
    """Scores of the queries at token indices `queries` [n] with the keys `distance` tokens before, [heads, visible];
    queries whose key is hidden, or before the first token, are left out. Of a single row of the batch.
    """
    segment = next((each for each in inputs.segments if _holds(each, distance)), None)
    keys = queries - distance
    if segment is None:
        return inputs.value.new_empty(inputs.query.shape[1], 0)
    first = segment.band.first_keys
    kept = (keys >= 0) if first is None else (keys >= 0) & (keys < first)
    queries, keys = queries[kept].to(inputs.value.device), keys[kept].to(inputs.value.device)
    query, key = segment.query[0][:, queries], segment.key[0][:, keys]
    wide = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    return _biased(inputs, (query.to(wide) * key.to(wide)).sum(-1) * inputs.scale, keys.new_full((1,), distance))


def _holds(segment: Segment, distance: int) -> bool:
    return segment.band.low <= distance and (segment.band.high is None or distance < segment.band.high)


def _biased(inputs: AttentionInputs, scores: Tensor, distance: Tensor) -> Tensor:
    return scores if inputs.bias is None else scores + inputs.bias.at(distance.clamp(min=0).to(scores.dtype))


def row_scores(inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Scores of the queries at token indices `queries` [n] with all keys, [heads, n, length], -inf for those hidden."""
    queries = queries.to(inputs.value.device)
    key = torch.arange(inputs.value.shape[2], device=queries.device)
    distance = queries[:, None] - key
    wide = torch.promote_types(inputs.value.dtype, torch.float32)
    scores = torch.full((inputs.query.shape[1], *distance.shape), -math.inf, dtype=wide, device=queries.device)
    for segment in inputs.segments:
        grouped = segment.query[0][:, queries].to(wide).unflatten(0, (segment.key.shape[1], -1))
        product = torch.einsum("ghmd,gnd->ghmn", grouped, segment.key[0].to(wide)).flatten(0, 1) * inputs.scale
        scores = torch.where(_visible(segment, distance, key), product, scores)
    return _biased(inputs, scores, distance)


def _visible(segment: Segment, distance: Tensor, key: Tensor) -> Tensor:
    band = segment.band
    inside = distance >= max(band.low, 0)
    inside = inside if band.high is None else inside & (distance < band.high)
    return inside if band.first_keys is None else inside & (key < band.first_keys)


def row_entropies(inputs: AttentionInputs, queries: Tensor) -> Tensor:
    """Entropy in nats of the attention weights of each query, [heads, n], some queries at a time."""
    each = inputs.query.shape[1] * inputs.value.shape[2]
    parts = queries.split(max(1, SCORES_AT_ONCE // each))
    return torch.cat([_entropy(row_scores(inputs, part)) for part in parts], dim=1)


def _entropy(scores: Tensor) -> Tensor:
    return torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1)
