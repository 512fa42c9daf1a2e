"""Dense attention with an N x N score tensor, in float32 or better: slow, but the reference for the other backends."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_coca.attention.inputs import (
    PAIRWISE,
    AttentionInputs,
    BackendError,
    Band,
    Needs,
    bias_of_pairs,
    query_block,
)

LONGEST = 8192
"""Maximum queries per call. At this length, the scores of one head take 256 MiB in float32, and a call allocates
several such tensors.
"""


class ReferenceBackend:
    """softmax(scale * Q' K'^T + bias) V with opt_einsum contractions. O(N^2) memory."""

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported: a package is missing, or there are too many
        tokens.
        """
        return missing_einsum() or (None if needs.ring else too_long(needs.length))  # rings compute small blocks

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention, [batch, heads, query_length, width of V], in the query's dtype.

        Raises:
            BackendError: the inputs have more than LONGEST queries.
        """
        if reason := too_long(inputs.query.shape[2]):
            raise BackendError(
                f"attention_backend: reference cannot compute this model ({reason}); set attention_backend: auto"
            )
        # Imported here because GPT-NeoX does not install opt_einsum, and the other backends work without it.
        import opt_einsum

        dtype, inputs = inputs.query.dtype, widened(inputs)
        weights = torch.softmax(with_sinks(_scores(inputs), inputs.sinks), dim=-1)
        weights = weights[..., : inputs.value.shape[2]].to(inputs.value.dtype)
        weights = torch.dropout(weights, inputs.dropout, train=inputs.dropout > 0)
        grouped = weights.unflatten(1, (inputs.value.shape[1], -1))
        return opt_einsum.contract("bghmn,bgnd->bghmd", grouped, inputs.value).flatten(1, 2).to(dtype)


def widened(inputs: AttentionInputs) -> AttentionInputs:
    """Convert the operands to float32 or better. If every step were rounded to half precision, the error would be
    several times larger.
    """
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    segments = tuple(replace(each, query=each.query.to(dtype), key=each.key.to(dtype)) for each in inputs.segments)
    return inputs.replace(segments=segments, value=inputs.value.to(dtype))


QUERY_ROWS = 256
"""Maximum queries per block in `attend_in_blocks`."""
LEAST_ROWS, MOST_ROWS, PAIRS = 64, 128, 1 << 20
"""Minimum queries, maximum queries and target number of pairs of a block, if a network computes each pair's bias."""


def attend_in_blocks(inputs: AttentionInputs) -> Tensor:
    """Compute attention one query block at a time, for inputs without documents. Memory is linear in the length, and
    the backward pass recomputes the scores, with the same dropout. Half-precision operands are converted to float32, so
    that the gradients of the blocks are summed in float32.
    """
    dtype, inputs = inputs.query.dtype, widened(inputs)
    block_of, outputs, size = ReferenceBackend().attend, [], QUERY_ROWS
    if inputs.bias is not None and inputs.bias.formula in PAIRWISE:
        size = min(max(PAIRS // inputs.value.shape[2], LEAST_ROWS), MOST_ROWS)
    for start in reversed(range(0, inputs.query.shape[2], size)):  # longest first, so each block reuses freed memory
        block, _ = query_block(inputs, start, size)
        again = torch.is_grad_enabled() and inputs.query.requires_grad
        outputs.append(recomputed(partial(block_of, block), block) if again else block_of(block))
    return torch.cat(outputs[::-1], dim=2).to(dtype)


def recomputed(run: Callable[[], Tensor], inputs: AttentionInputs) -> Tensor:
    """Compute attention with `run`, which the backward pass calls again instead of keeping its intermediate results."""
    # PyTorch restores the random state of the devices of the arguments, which must therefore include a tensor.
    return checkpoint(lambda query: run(), inputs.query, use_reentrant=False, preserve_rng_state=inputs.dropout > 0)


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Append the sink scores [heads], if any, to the scores [..., heads, rows, keys] as an additional column."""
    if sinks is None:
        return scores
    return torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)


def gate_bias(gates: Tensor, queries: int | Tensor) -> Tensor:
    """For each query and key, return the sum of the log gates [batch, heads, length] of the tokens after the key up to
    the query, [batch, heads, queries, length] float64. Sums for keys after the query have no meaning. `queries` are the
    queries' token indices, or the index of the first query.
    """
    total = gates.double().cumsum(-1)
    rows = total[:, :, queries:] if isinstance(queries, int) else total[:, :, queries]
    return rows[..., None] - total[:, :, None]


def too_long(queries: int) -> str | None:
    """Return None, or the reason why this number of queries is not supported."""
    return f"its N x N scores are limited to {LONGEST:,} tokens, not {queries:,}" if queries > LONGEST else None


def missing_einsum() -> str | None:
    """Return None, or the reason why opt_einsum's contractions cannot run here."""
    return None if find_spec("opt_einsum") else "opt_einsum is not installed (pip install opt_einsum)"


def _scores(inputs: AttentionInputs) -> Tensor:
    """Return the scores [batch, heads, query_length, key_length] of `widened` inputs. Each pair is scored by the
    segment of its band; pairs outside all bands get -inf.
    """
    import opt_einsum

    distance = _distances(inputs.query.shape[2], inputs.value.shape[2], inputs.value.device)
    first, key = _first_keys(inputs), torch.arange(distance.shape[1], device=distance.device)
    scores = inputs.query.new_full((), -math.inf)
    for segment in inputs.segments:
        query = segment.query.unflatten(1, (segment.key.shape[1], -1))
        product = opt_einsum.contract("bghmd,bgnd->bghmn", query, segment.key).flatten(1, 2) * inputs.scale
        if inputs.softcap is not None:
            product = inputs.softcap * torch.tanh(product / inputs.softcap)
        scores = torch.where(visible(segment.band, distance, key, first), product, scores)
    if inputs.bias is not None:
        token = distance[:, :1]  # the query's token index: its distance from the first key
        query = (token if first is None else token - first[:, 0]).to(scores.dtype)
        bias = bias_of_pairs(inputs.bias, distance.clamp(min=0).to(scores.dtype), query)
        scores = scores + (bias.transpose(0, 1) if bias.dim() == 4 else bias)
    if inputs.gates is not None:
        scores = scores + gate_bias(inputs.gates, inputs.past).to(scores.dtype)
    return scores


def visible(band: Band, distance: Tensor, key: Tensor, first: Tensor | None) -> Tensor:
    """Return the mask of the visible pairs in the band. `distance` is m - n of every pair, `key` is the index n of
    every key, and `first` is the index of the first key in each query's document, or None. The three tensors broadcast
    against each other.
    """
    inside, begin = distance >= 0, 0 if first is None else first
    if band.low or band.high is not None:
        apart = band.apart(key + distance - begin, key - begin)
        inside = inside & (apart >= band.low)
        inside = inside if band.high is None else inside & (apart < band.high)
    inside = inside if first is None else inside & (key >= first)
    return inside if band.first_keys is None else inside & (key < begin + band.first_keys)


def _first_keys(inputs: AttentionInputs) -> Tensor | None:
    """Return the index of the first key in each query's document, [batch, 1, query_length, 1], or None."""
    return None if inputs.documents is None else inputs.documents.starts[:, None, inputs.past :, None]


def _distances(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """Return r = m - n of every pair, [query_length, key_length] int64; the queries are the last tokens."""
    rows = torch.arange(key_length - query_length, key_length, device=device)
    return rows[:, None] - torch.arange(key_length, device=device)[None, :]
