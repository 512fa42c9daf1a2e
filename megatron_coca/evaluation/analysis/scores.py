"""Scores of some pairs of a layer, as softmax takes them: scaled, with the bias, by the segment that serves the pair."""

import math

import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Segment

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
