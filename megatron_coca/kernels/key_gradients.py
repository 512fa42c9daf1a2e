"""The kernel of dK' and dV."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.plan import Operands, Plan
from megatron_coca.kernels.scores import load_coefficients, logits, part, query_phases, start_of_document
from megatron_coca.kernels.tiles import dot, load_tile, load_two, operand, plane, store_tile, zero_tile


def key_gradients(operands: Operands, plan: Plan, results: Operands, saved: tuple[Tensor, Tensor, Tensor]) -> None:
    """Fills `results.key`, `results.far_key` and `results.value`.

    `saved` is (gradient of the output, log-sum-exp to the base 2, rowsum(dO * O)).
    """
    launch, key = plan.blocks.key_gradients, operands.key
    grad, *rows = saved
    _key_gradients[(triton.cdiv(key.shape[2], launch.keys), key.shape[0] * key.shape[1])](
        *map(operand, operands.parts),
        operand(grad),
        operand(results.key),
        operand(operands.filled(results.far_key)),
        operand(results.value),
        *rows,
        operands.filled(operands.coefficients),
        operands.filled(operands.starts),
        operands.filled(None if operands.starts is None else _stops(operands.starts)),
        operands.sizes,
        plan.limits,
        plan.scale,
        **plan.options(launch, operands),
    )


def _stops(starts: Tensor) -> Tensor:
    """[batch, key_length] int64: the first token after the document that a token belongs to."""
    tokens = torch.arange(starts.shape[1], device=starts.device).repeat(starts.shape[0], 1)
    return torch.searchsorted(starts, tokens, right=True)


@triton.jit
def _key_gradients(
    query,
    key,
    far_query,
    far_key,
    value,
    grad,
    key_out,
    far_key_out,
    value_out,
    lse,
    delta,
    coefficients,
    starts,
    stops,
    sizes,
    limits,
    scale,
    KIND: tl.constexpr,
):
    """One program per block of keys and key head, over the query heads that share it."""
    heads, group, query_length, key_length = sizes
    kv_heads = heads // group
    row = tl.program_id(0) * KIND.keys
    batch = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    planes = (plane(key, batch, kv_head), plane(far_key, batch, kv_head))
    held = load_two(planes[0], planes[1], row, key_length, True, KIND.far, KIND.keys, KIND)
    v = load_tile(plane(value, batch, kv_head), row, key_length, KIND.width, KIND.keys, KIND.columns)
    n = row + tl.arange(0, KIND.keys)[:, None]
    documents = (starts, batch)
    none = zero_tile(KIND.keys, KIND.columns)
    sums = (none, none, none)
    phases = query_phases(row, starts, stops, batch, query_length, key_length, limits, KIND)
    begin, diagonal_end, full, edge, far_begin, end = phases
    for member in range(0, group):
        head = kv_head * group + member
        offset = (batch * heads + head).to(tl.int64) * query_length
        queries = (plane(query, batch, head), plane(far_query, batch, head), query_length, key_length)
        above = (plane(grad, batch, head), lse + offset, delta + offset)
        scoring = (limits, load_coefficients(coefficients, head, KIND), scale * 1.4426950408889634)
        sums = _tiles(
            sums, begin, diagonal_end, held, v, queries, above, n, documents, scoring, True, False, True, KIND
        )
        sums = _tiles(sums, full, edge, held, v, queries, above, n, documents, scoring, True, False, False, KIND)
        if KIND.window:
            sums = _tiles(
                sums, edge, far_begin, held, v, queries, above, n, documents, scoring, True, KIND.far, True, KIND
            )
        if KIND.far:
            sums = _tiles(
                sums, far_begin, end, held, v, queries, above, n, documents, scoring, False, True, KIND.first, KIND
            )
    store_tile(sums[0] * scale, plane(key_out, batch, kv_head), row, key_length, KIND.width)
    if KIND.far:
        store_tile(sums[1] * scale, plane(far_key_out, batch, kv_head), row, key_length, KIND.width)
    store_tile(sums[2], plane(value_out, batch, kv_head), row, key_length, KIND.width)


@triton.jit
def _tiles(
    sums,
    begin,
    end,
    held,
    v,
    queries,
    above,
    n,
    documents,
    scoring,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
):
    """The query tiles `begin` to `end` added to (dK' near, dK' far, dV). A tile is [keys, queries] here, so that no
    matrix of weights is transposed.
    """
    near_sum, far_sum, value_sum = sums
    near, far, query_length, key_length = queries
    limits, bias, scale = scoring
    for tile in range(begin, end):
        rows = tile * KIND.rows + tl.arange(0, KIND.rows)
        m = (key_length - query_length + rows)[None, :]
        r = m - n
        start = start_of_document(documents[0], documents[1], m, key_length, KIND)
        loaded = load_two(near, far, tile * KIND.rows, query_length, NEAR, FAR, KIND.rows, KIND)
        grad = load_tile(above[0], tile * KIND.rows, query_length, KIND.width, KIND.rows, KIND.columns)
        # A row beyond the last query gets an infinite sum of weights, so that its weights are 0.
        lse = tl.load(above[1] + rows, mask=rows < query_length, other=float("inf"))
        delta = tl.load(above[2] + rows, mask=rows < query_length, other=0.0)
        scores = logits(held, loaded, r, n, start, limits, bias, scale, NEAR, FAR, MASKED or KIND.documents, KIND)
        weights = tl.exp2(scores - lse[None, :])
        value_sum += dot(weights.to(grad.dtype), grad)
        slopes = weights * (dot(v, tl.trans(grad)) - delta[None, :])
        near_slopes, far_slopes = part(slopes, r, limits, NEAR, FAR)
        if NEAR:
            near_sum += dot(near_slopes.to(grad.dtype), loaded[0])
        if FAR:
            far_sum += dot(far_slopes.to(grad.dtype), loaded[1])
    return near_sum, far_sum, value_sum
