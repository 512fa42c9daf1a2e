"""Flash attention forward: softmax online in float32, one dot product per tile, tiles that no band covers left out."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.plan import LOG2_E, Operands, Plan
from megatron_coca.kernels.scores import key_phases, load_coefficients, logits, start_of_document
from megatron_coca.kernels.tiles import constant_rows, load_tile, load_two, operand, plane, store_tile, zero_tile


def forward(operands: Operands, plan: Plan) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp).

    The output has the query's shape and dtype; its heads lie side by side in memory, so that joining them copies
    nothing. The log-sum-exp is float32 [batch, heads, query_length], to the base 2.
    """
    query, launch = operands.query, plan.blocks.forward
    batch, heads, query_length, head_dim = query.shape
    out = torch.empty((batch, query_length, heads, head_dim), dtype=query.dtype, device=query.device).transpose(1, 2)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    _attend[(triton.cdiv(query_length, launch.rows), batch * heads)](
        *map(operand, operands.parts),
        operand(out),
        lse,
        operands.filled(operands.coefficients),
        operands.filled(operands.starts),
        operands.sizes,
        plan.limits,
        plan.scale * LOG2_E,
        **plan.options(launch, operands),
    )
    return out, lse


@triton.jit
def _attend(
    query,
    key,
    far_query,
    far_key,
    value,
    out,
    lse,
    coefficients,
    starts,
    sizes,
    limits,
    scale,
    KIND: tl.constexpr,
):
    """One program per block of queries and head; the last blocks, which see most, go first."""
    heads, group, query_length, key_length = sizes
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * KIND.rows
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    rows = row + tl.arange(0, KIND.rows)
    m = key_length - query_length + rows
    planes = (plane(query, batch, head), plane(far_query, batch, head))
    held = load_two(planes[0], planes[1], row, query_length, True, KIND.far, KIND.rows, KIND)
    kv_head = head // group
    keys = (plane(key, batch, kv_head), plane(far_key, batch, kv_head), plane(value, batch, kv_head), key_length)
    start = start_of_document(starts, batch, m, key_length, KIND)[:, None]
    scoring = (limits, load_coefficients(coefficients, head, KIND), scale)
    # A finite peak to begin with: a tile without a visible key then leaves it, and no -inf is subtracted from -inf.
    state = (
        zero_tile(KIND.rows, KIND.columns),
        constant_rows(-1e30, KIND.rows),
        constant_rows(0.0, KIND.rows),
    )
    phases = key_phases(key_length - query_length + row, starts, batch, key_length, limits, KIND)
    begin, far_end, edge, full, diagonal, end = phases
    if KIND.far:
        state = _tiles(state, begin, far_end, held, keys, m, start, scoring, False, True, KIND.first, KIND)
    if KIND.window:
        state = _tiles(state, edge, full, held, keys, m, start, scoring, True, KIND.far, True, KIND)
    state = _tiles(state, full, diagonal, held, keys, m, start, scoring, True, False, False, KIND)
    state = _tiles(state, diagonal, end, held, keys, m, start, scoring, True, False, True, KIND)
    acc, peak, total = state
    store_tile(acc / total[:, None], plane(out, batch, head), row, query_length, KIND.width)
    place = lse + tl.program_id(1).to(tl.int64) * query_length + rows
    tl.store(place, peak + tl.log2(total), mask=rows < query_length)


@triton.jit
def _tiles(
    state,
    begin,
    end,
    held,
    keys,
    m,
    start,
    scoring,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
):
    """The key tiles `begin` to `end` folded into (accumulator, largest score, sum of weights)."""
    acc, peak, total = state
    near, far, values, key_length = keys
    limits, bias, scale = scoring
    for tile in range(begin, end):
        n = tile * KIND.keys + tl.arange(0, KIND.keys)[None, :]
        r = m[:, None] - n
        loaded = load_two(near, far, tile * KIND.keys, key_length, NEAR, FAR, KIND.keys, KIND)
        v = load_tile(values, tile * KIND.keys, key_length, KIND.width, KIND.keys, KIND.columns)
        scores = logits(held, loaded, r, n, start, limits, bias, scale, NEAR, FAR, MASKED or KIND.documents, KIND)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total
