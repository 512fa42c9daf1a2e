"""The kernel of dQ' and of the gradients of the bias's coefficients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.plan import Operands, Plan
from megatron_coca.kernels.scores import (
    bias_derivatives,
    key_phases,
    load_coefficients,
    logits,
    part,
    start_of_document,
)
from megatron_coca.kernels.tiles import constant_rows, dot, load_tile, load_two, operand, plane, store_tile, zero_tile


def query_gradients(
    operands: Operands,
    plan: Plan,
    results: Operands,
    saved: tuple[Tensor, Tensor, Tensor],
    with_coefficients: bool,
) -> Tensor | None:
    """Fills `results.query` and `results.far_query`; the gradients of the coefficients [heads, 2] where asked for.

    `saved` is (gradient of the output, log-sum-exp to the base 2, rowsum(dO * O)).
    """
    launch = plan.blocks.query_gradients
    batch, heads, length, _ = operands.query.shape
    blocks = triton.cdiv(length, launch.rows)
    partial = None
    if with_coefficients:
        partial = torch.empty((batch, heads, blocks, 2), dtype=torch.float32, device=operands.query.device)
    grad, *rows = saved
    _query_gradients[(blocks, batch * heads)](
        *map(operand, operands.parts),
        operand(grad),
        operand(results.query),
        operand(operands.filled(results.far_query)),
        operands.filled(partial),
        *rows,
        operands.filled(operands.coefficients),
        operands.filled(operands.starts),
        operands.sizes,
        plan.limits,
        plan.scale,
        BIAS_GRADIENTS=with_coefficients,
        **plan.options(launch, operands),
    )
    return None if partial is None else partial.sum((0, 2), dtype=torch.float64).float()


@triton.jit
def _query_gradients(
    query,
    key,
    far_query,
    far_key,
    value,
    grad,
    query_out,
    far_query_out,
    coefficients_out,
    lse,
    delta,
    coefficients,
    starts,
    sizes,
    limits,
    scale,
    BIAS_GRADIENTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program per block of queries and head, over the same tiles as the forward pass."""
    heads, group, query_length, key_length = sizes
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row = block * KIND.rows
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    rows = row + tl.arange(0, KIND.rows)
    m = key_length - query_length + rows
    planes = (plane(query, batch, head), plane(far_query, batch, head))
    held = load_two(planes[0], planes[1], row, query_length, True, KIND.far, KIND.rows, KIND)
    kv_head = head // group
    keys = (plane(key, batch, kv_head), plane(far_key, batch, kv_head), plane(value, batch, kv_head), key_length)
    place = tl.program_id(1).to(tl.int64) * query_length + rows
    # A row beyond the last query gets an infinite sum of weights, so that its weights are 0.
    above = (
        load_tile(plane(grad, batch, head), row, query_length, KIND.width, KIND.rows, KIND.columns),
        tl.load(lse + place, mask=rows < query_length, other=float("inf")),
        tl.load(delta + place, mask=rows < query_length, other=0.0),
    )
    start = start_of_document(starts, batch, m, key_length, KIND)[:, None]
    scoring = (limits, load_coefficients(coefficients, head, KIND), scale * 1.4426950408889634)
    none = zero_tile(KIND.rows, KIND.columns)
    nothing = constant_rows(0.0, KIND.rows)
    sums = (none, none, nothing, nothing, nothing, nothing, nothing)
    phases = key_phases(key_length - query_length + row, starts, batch, key_length, limits, KIND)
    begin, far_end, edge, full, diagonal, end = phases
    WITH: tl.constexpr = BIAS_GRADIENTS
    if KIND.far:
        sums = _tiles(sums, begin, far_end, held, keys, above, m, start, scoring, False, True, KIND.first, WITH, KIND)
    if KIND.window:
        sums = _tiles(sums, edge, full, held, keys, above, m, start, scoring, True, KIND.far, True, WITH, KIND)
    sums = _tiles(sums, full, diagonal, held, keys, above, m, start, scoring, True, False, False, WITH, KIND)
    sums = _tiles(sums, diagonal, end, held, keys, above, m, start, scoring, True, False, True, WITH, KIND)
    store_tile(sums[0] * scale, plane(query_out, batch, head), row, query_length, KIND.width)
    if KIND.far:
        store_tile(sums[1] * scale, plane(far_query_out, batch, head), row, query_length, KIND.width)
    if BIAS_GRADIENTS:
        pair = coefficients_out + (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + block) * 2
        # A row of dS sums to 0, but for the rounding of D, which would enter once for every query.
        tl.store(pair, tl.sum(sums[3] - sums[2] * sums[5], 0))
        tl.store(pair + 1, tl.sum(sums[4] - sums[2] * sums[6], 0))


@triton.jit
def _tiles(
    sums,
    begin,
    end,
    held,
    keys,
    above,
    m,
    start,
    scoring,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    BIAS_GRADIENTS: tl.constexpr,
    KIND: tl.constexpr,
):
    """The key tiles `begin` to `end` added to dQ' near and far and, by row, the sums of dS, of dS * db/dc0 and dS *
    db/dc1, and of P * db/dc0 and P * db/dc1, b being the bias.
    """
    near_sum, far_sum, slope_sum, first_sum, second_sum, first_mean, second_mean = sums
    near, far, values, key_length = keys
    grad, lse, delta = above
    limits, bias, scale = scoring
    for tile in range(begin, end):
        n = tile * KIND.keys + tl.arange(0, KIND.keys)[None, :]
        r = m[:, None] - n
        loaded = load_two(near, far, tile * KIND.keys, key_length, NEAR, FAR, KIND.keys, KIND)
        v = load_tile(values, tile * KIND.keys, key_length, KIND.width, KIND.keys, KIND.columns)
        scores = logits(held, loaded, r, n, start, limits, bias, scale, NEAR, FAR, MASKED or KIND.documents, KIND)
        weights = tl.exp2(scores - lse[:, None])
        slopes = weights * (dot(grad, tl.trans(v)) - delta[:, None])
        if BIAS_GRADIENTS:
            first, second = bias_derivatives(r, bias, KIND)
            slope_sum += tl.sum(slopes, 1)
            first_sum += tl.sum(slopes * first, 1)
            second_sum += tl.sum(slopes * second, 1)
            first_mean += tl.sum(weights * first, 1)
            second_mean += tl.sum(weights * second, 1)
        near_slopes, far_slopes = part(slopes, r, limits, NEAR, FAR)
        if NEAR:
            near_sum += dot(near_slopes.to(v.dtype), loaded[0])
        if FAR:
            far_sum += dot(far_slopes.to(v.dtype), loaded[1])
    return near_sum, far_sum, slope_sum, first_sum, second_sum, first_mean, second_mean
