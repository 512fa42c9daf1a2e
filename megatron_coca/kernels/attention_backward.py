"""Flash attention backward: a kernel for dK' and dV, and a kernel for dQ' and the bias coefficients, without atomics.

P are the attention weights, D = rowsum(dO * O), and dS = P * (dO V^T - D). A segment's gradients are sums over the
pairs in its band. A single program sums each number in a fixed order, so equal inputs give bitwise equal results.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_coca.kernels.launch_constants import AttentionCall, Operands, padded
from megatron_coca.kernels.tiles import (
    OPTIONS,
    add_bias,
    bias_derivatives,
    block_and_head,
    constant_rows,
    dot,
    dot_halves,
    key_phases,
    load_coefficients,
    load_halves,
    load_tile,
    load_turns,
    load_two,
    logits,
    operand,
    part,
    plane,
    query_phases,
    start_of_document,
    store_gradient,
    store_tile,
    turns_of,
    visible,
    zero_tile,
)


def key_gradients(
    operands: Operands, plan: AttentionCall, results: Operands, saved: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fill `results.key`, `results.far_key` and `results.value`.

    `saved` is (gradient of the output, log-sum-exp to base 2, rowsum(dO * O)). Each segment has its own launch, because
    the accumulators of three gradients do not fit in the registers. The second launch adds to the dV of the first, in
    float32.
    """
    near = operands.query, operands.key, results.key
    if operands.far_query is None:
        _launch(operands, plan, near, (results.value, results.value), saved, beyond=False)
        return
    partial = torch.empty(results.value.shape, dtype=torch.float32, device=results.value.device)
    far = operands.far_query, operands.far_key, results.far_key
    _launch(operands, plan, near, (partial, partial), saved, beyond=False)
    _launch(operands, plan, far, (partial, results.value), saved, beyond=True)


def _launch(
    operands: Operands,
    plan: AttentionCall,
    segment: tuple[Any, ...],
    values: tuple[Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    beyond: bool,
) -> None:
    """Compute dK' and dV of one segment, `segment` = (query, key, dK'). `values` is (dV before this launch, dV after
    it). `beyond` is True for the segment with the distances that are not below the window.
    """
    launch, key = plan.blocks.key_gradients, operands.key
    grad, *rows = saved
    _key_gradients[(triton.cdiv(key.shape[2], launch.keys) * key.shape[0] * key.shape[1],)](
        tuple(map(operand, (*segment[:2], operands.value, grad))),
        tuple(map(operand, (segment[2], *values))),
        *rows,
        operands.turns,
        operands.filled(operands.coefficients),
        operands.filled(operands.starts),
        operands.filled(None if operands.starts is None else _stops(operands.starts)),
        operands.sizes,
        plan.limits,
        plan.scale,
        BEYOND=beyond,
        **plan.options(launch, operands),
    )


_STOPS = WeakIdKeyDictionary()
"""Results of `_stops`, by its argument. All layers pass the same tensor in a micro-batch."""


def _stops(starts: Tensor) -> Tensor:
    """Return the index of the first token after each token's document, int64 [batch, key_length]. The result is
    computed once for each tensor, so the values of `starts` must not change.
    """
    if starts not in _STOPS:
        tokens = torch.arange(starts.shape[1], device=starts.device).repeat(starts.shape[0], 1)
        _STOPS[starts] = torch.searchsorted(starts, tokens, right=True)
    stops: Tensor = _STOPS[starts]
    return stops


@triton.jit
def _key_gradients(
    tensors,
    outputs,
    lse,
    delta,
    turns,
    coefficients,
    starts,
    stops,
    sizes,
    limits,
    scale,
    BEYOND: tl.constexpr,
    KIND: tl.constexpr,
):
    """Run one program per key block and key head, over all query heads that share the key head. It handles the pairs
    with distances below the window, or all pairs if there is no window. With BEYOND, it handles the other pairs.
    """
    query, key, value, grad = tensors
    key_out, value_sum, value_out = outputs
    heads, group, query_length, key_length = sizes
    block, _, _, batch, kv_head = block_and_head(key_length, heads // group, KIND.keys)
    row = block * KIND.keys
    of_key = turns_of(turns[1], turns[2], batch, 0, KIND)
    held = load_halves(plane(key, batch, kv_head), of_key, row, key_length, False, KIND.keys, KIND)
    v = load_tile(plane(value, batch, kv_head), row, key_length, KIND.value_width, KIND.keys, KIND.value_columns)
    n = row + tl.arange(0, KIND.keys)[:, None]
    # A key is seen only by queries of its own document, which come before the document's end. The bounds are per key,
    # not per query.
    document = (
        start_of_document(starts, batch, n, key_length, KIND),
        start_of_document(stops, batch, n, key_length, KIND),
    )
    none = zero_tile(KIND.keys, KIND.columns)
    sums = (none, none, zero_tile(KIND.keys, KIND.value_columns))
    if BEYOND:
        place = plane(value_sum, batch, kv_head)
        sums = (none, none, load_tile(place, row, key_length, KIND.value_width, KIND.keys, KIND.value_columns))
    phases = query_phases(row, starts, stops, batch, query_length, key_length, limits, KIND)
    begin, diagonal_end, full, edge, far_begin, end = phases
    # One loop needs fewer registers than several, but it masks every tile. It is used with documents, because every
    # tile needs the mask; with a window, because most tiles need it; and with magnitudes, which need the registers.
    for member in range(0, group):
        head = kv_head * group + member
        offset = (batch * heads + head).to(tl.int64) * query_length
        of_query = turns_of(turns[0], turns[2], batch, head, KIND)
        queries = (plane(query, batch, head), of_query, query_length, key_length)
        above = (plane(grad, batch, head), lse + offset, delta + offset)
        scoring = (limits, load_coefficients(coefficients, head, scale, KIND), scale * 1.4426950408889634)
        if not BEYOND and (KIND.documents or KIND.window or KIND.frequencies > 0):
            sums = _tiles(sums, begin, far_begin, held, v, queries, above, n, document, scoring, BEYOND, True, KIND)
        elif not BEYOND:
            sums = _tiles(sums, begin, diagonal_end, held, v, queries, above, n, document, scoring, BEYOND, True, KIND)
            sums = _tiles(sums, full, end, held, v, queries, above, n, document, scoring, BEYOND, False, KIND)
        elif KIND.documents or KIND.first:
            sums = _tiles(sums, edge, end, held, v, queries, above, n, document, scoring, BEYOND, True, KIND)
        else:
            sums = _tiles(sums, edge, far_begin, held, v, queries, above, n, document, scoring, BEYOND, True, KIND)
            sums = _tiles(sums, far_begin, end, held, v, queries, above, n, document, scoring, BEYOND, False, KIND)
    place = plane(key_out, batch, kv_head)
    store_gradient(sums[0] * scale, sums[1] * scale, place, of_key, row, key_length, False, KIND.keys, KIND)
    store_tile(sums[2], plane(value_out, batch, kv_head), row, key_length, KIND.value_width)


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
    document,
    scoring,
    BEYOND: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add the query tiles `begin` to `end` to `sums`: dK', the second half of dK' if there are magnitudes, and dV.
    Tiles have the shape [keys, queries] here, so that no weight matrix has to be transposed.
    """
    key_sum, second_sum, value_sum = sums
    query, of_query, query_length, key_length = queries
    limits, bias, scale = scoring
    for tile in range(begin, end):
        rows = tile * KIND.rows + tl.arange(0, KIND.rows)
        m = (key_length - query_length + rows)[None, :]
        loaded = load_halves(query, of_query, tile * KIND.rows, query_length, KIND.offset, KIND.rows, KIND)
        grad = load_tile(above[0], tile * KIND.rows, query_length, KIND.value_width, KIND.rows, KIND.value_columns)
        # The log-sum-exp of rows beyond the last query is infinite, so that their weights are 0.
        lse = tl.load(above[1] + rows, mask=rows < query_length, other=float("inf"))
        delta = tl.load(above[2] + rows, mask=rows < query_length, other=0.0)
        if KIND.frequencies > 0:
            products = dot_halves(held, loaded)
        else:
            products = dot(held[0], tl.trans(loaded[0]))
        scores = add_bias(products, m, n, bias, KIND)
        if MASKED or KIND.documents:
            seen = visible(m - n, n, document[0], limits, not BEYOND, BEYOND, KIND)
            if KIND.documents:
                seen = seen & (m < document[1])
            scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp2(scores * scale - lse[None, :])
        value_sum += dot(weights.to(grad.dtype), grad)
        slopes = weights * (dot(v, tl.trans(grad)) - delta[None, :])
        key_sum += dot(slopes.to(grad.dtype), loaded[0])
        if KIND.frequencies > 0:
            second_sum += dot(slopes.to(grad.dtype), loaded[1])
    return key_sum, second_sum, value_sum


def query_gradients(
    operands: Operands,
    plan: AttentionCall,
    results: Operands,
    saved: tuple[Tensor, Tensor, Tensor],
    with_coefficients: bool,
) -> Tensor | None:
    """Fill `results.query`, `results.far_query` and `results.offset`, and return the gradients of the coefficients,
    [heads, 2], if requested.

    `saved` is (gradient of the output, log-sum-exp to base 2, rowsum(dO * O)).
    """
    launch = plan.blocks.query_gradients
    batch, heads, length, _ = operands.query.shape
    blocks = triton.cdiv(length, launch.rows)
    partial = None
    if with_coefficients:
        partial = torch.empty((batch, heads, blocks, 2), dtype=torch.float32, device=operands.query.device)
    angles = None
    if results.offset is not None:
        shape = (batch, heads, blocks, results.offset.shape[1])
        angles = torch.empty(shape, dtype=torch.float32, device=operands.query.device)
    grad, *rows = saved
    _query_gradients[(blocks * batch * heads,)](
        operands.tuples,
        operand(grad),
        (operand(results.query), operand(operands.filled(results.far_query)), operands.filled(partial)),
        operands.filled(angles),
        *rows,
        operands.turns,
        operands.filled(operands.coefficients),
        operands.filled(operands.starts),
        operands.sizes,
        plan.limits,
        plan.scale,
        BIAS=with_coefficients,
        **plan.options(launch, operands),
    )
    if results.offset is not None and angles is not None:
        results.offset.copy_(angles.sum((0, 2), dtype=torch.float64))
    return None if partial is None else partial.sum((0, 2), dtype=torch.float64).float()


@triton.jit
def _query_gradients(
    tensors,
    grad,
    outputs,
    angles_out,
    lse,
    delta,
    turns,
    coefficients,
    starts,
    sizes,
    limits,
    scale,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Run one program per query block and head, over the same tiles as the forward pass."""
    query, key, far_query, far_key, value = tensors
    query_out, far_query_out, coefficients_out = outputs
    heads, group, query_length, key_length = sizes
    block, blocks, place, batch, head = block_and_head(query_length, heads, KIND.rows)
    block = blocks - 1 - block
    row = block * KIND.rows
    rows = row + tl.arange(0, KIND.rows)
    m = key_length - query_length + rows
    planes = (plane(query, batch, head), plane(far_query, batch, head))
    of_query = turns_of(turns[0], turns[2], batch, head, KIND)
    held = load_two(planes[0], planes[1], of_query, row, query_length, KIND.offset, True, KIND.far, KIND.rows, KIND)
    kv_head = head // group
    tiles = (plane(key, batch, kv_head), plane(far_key, batch, kv_head), plane(value, batch, kv_head))
    keys = (tiles[0], tiles[1], turns_of(turns[1], turns[2], batch, 0, KIND), tiles[2], key_length)
    seat = place.to(tl.int64) * query_length + rows
    # The log-sum-exp of rows beyond the last query is infinite, so that their weights are 0.
    above = (
        load_tile(plane(grad, batch, head), row, query_length, KIND.value_width, KIND.rows, KIND.value_columns),
        tl.load(lse + seat, mask=rows < query_length, other=float("inf")),
        tl.load(delta + seat, mask=rows < query_length, other=0.0),
    )
    start = start_of_document(starts, batch, m, key_length, KIND)[:, None]
    scoring = (limits, load_coefficients(coefficients, head, scale, KIND), scale * 1.4426950408889634)
    none = zero_tile(KIND.rows, KIND.columns)
    nothing = constant_rows(0.0, KIND.rows)
    sums = (none, none, nothing, nothing, nothing, nothing, nothing)
    phases = key_phases(key_length - query_length + row, starts, batch, key_length, limits, KIND)
    begin, far_end, edge, full, diagonal, end = phases
    if KIND.far:
        sums = _query_tiles(
            sums, begin, far_end, held, keys, above, m, start, scoring, False, True, KIND.first, BIAS, KIND
        )
    if KIND.window and KIND.frequencies == 0:
        sums = _query_tiles(sums, edge, full, held, keys, above, m, start, scoring, True, KIND.far, True, BIAS, KIND)
    if KIND.frequencies == 0:
        sums = _query_tiles(sums, full, diagonal, held, keys, above, m, start, scoring, True, False, False, BIAS, KIND)
        sums = _query_tiles(sums, diagonal, end, held, keys, above, m, start, scoring, True, False, True, BIAS, KIND)
    else:  # a second loop would need too many registers
        sums = _query_tiles(sums, edge, end, held, keys, above, m, start, scoring, True, False, True, BIAS, KIND)
    place_out = plane(query_out, batch, head)
    first, second = sums[0] * scale, sums[1] * scale
    store_gradient(first, second, place_out, of_query, row, query_length, KIND.offset, KIND.rows, KIND)
    if KIND.offset:
        part_out = angles_out + (place.to(tl.int64) * blocks + block) * KIND.frequencies
        _store_angles(first, second, planes[0], of_query, part_out, row, query_length, KIND)
    if KIND.far:
        store_tile(second, plane(far_query_out, batch, head), row, query_length, KIND.width)
    if BIAS:
        pair = coefficients_out + (place.to(tl.int64) * blocks + block) * 2
        # Each row of dS sums to 0 up to the rounding error of D. Subtract that error, which would add up over queries.
        tl.store(pair, tl.sum(sums[3] - sums[2] * sums[5], 0))
        tl.store(pair + 1, tl.load(coefficients + 2 * head) * tl.sum(sums[4] - sums[2] * sums[6], 0))


@triton.jit
def _store_angles(first, second, magnitudes, turns, out, start, length, KIND: tl.constexpr):
    """Store the gradient of the head's constant angles for one block of queries. `first` and `second` are the halves of
    the gradient of Q'. The result is the sum over queries of m (first sin - second cos), because d cos(a - delta) / d
    delta = sin(a - delta).
    """
    cos, sin = load_turns(turns, start, length, KIND.offset, KIND.rows, KIND)
    m = load_tile(magnitudes, start, length, KIND.width, KIND.rows, KIND.columns).to(tl.float32)
    columns = tl.arange(0, KIND.columns)
    tl.store(out + columns, tl.sum(m * (first * sin - second * cos), 0), mask=columns < KIND.frequencies)


@triton.jit
def _query_tiles(
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
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Add the key tiles `begin` to `end` to `sums`: the near and far dQ' or, if there are magnitudes, the halves of
    dQ', and the row sums of dS, dS * db/dc0, dS * db/dc1 / c0, P * db/dc0 and P * db/dc1 / c0. Here b is the bias.
    """
    near_sum, far_sum, slope_sum, first_sum, second_sum, first_mean, second_mean = sums
    near, far, turns, values, key_length = keys
    grad, lse, delta = above
    limits, bias, scale = scoring
    for tile in range(begin, end):
        n = tile * KIND.keys + tl.arange(0, KIND.keys)[None, :]
        loaded = load_two(near, far, turns, tile * KIND.keys, key_length, False, NEAR, FAR, KIND.keys, KIND)
        v = load_tile(values, tile * KIND.keys, key_length, KIND.value_width, KIND.keys, KIND.value_columns)
        scores = logits(held, loaded, m[:, None], n, start, limits, bias, NEAR, FAR, MASKED or KIND.documents, KIND)
        weights = tl.exp2(scores * scale - lse[:, None])
        slopes = weights * (dot(grad, tl.trans(v)) - delta[:, None])
        if BIAS:
            first, second = bias_derivatives(m[:, None], n, bias[1], KIND)
            slope_sum += tl.sum(slopes, 1)
            first_sum += tl.sum(slopes * first, 1)
            second_sum += tl.sum(slopes * second, 1)
            first_mean += tl.sum(weights * first, 1)
            second_mean += tl.sum(weights * second, 1)
        near_slopes, far_slopes = part(slopes, m[:, None] - n, limits, NEAR, FAR)
        if NEAR:
            near_sum += dot(near_slopes.to(v.dtype), loaded[0])
        if FAR or KIND.frequencies > 0:
            far_sum += dot(far_slopes.to(v.dtype), loaded[1])
    return near_sum, far_sum, slope_sum, first_sum, second_sum, first_mean, second_mean


ROWS = 64


def backward(
    operands: Operands, plan: AttentionCall, out: Tensor, lse: Tensor, grad: Tensor, with_coefficients: bool
) -> tuple[Operands, Tensor | None]:
    """Compute the gradients of all operands and, if `with_coefficients` is True, of the coefficients [heads, 2].

    `out` and `lse` are the results of `forward`; `grad` is the gradient of `out` with a contiguous last dimension.
    """
    results = Operands(
        query=torch.empty_like(operands.query),
        key=torch.empty_like(operands.key),
        far_query=None if operands.far_query is None else torch.empty_like(operands.far_query),
        far_key=None if operands.far_key is None else torch.empty_like(operands.far_key),
        value=torch.empty_like(operands.value),
        coefficients=None,
        starts=None,
        offset=None if operands.offset is None else torch.empty_like(operands.offset),
    )
    with torch.cuda.device_of(grad):
        saved = grad, lse, _output_products(out, grad)
        key_gradients(operands, plan, results, saved)
        return results, query_gradients(operands, plan, results, saved, with_coefficients)


def _output_products(out: Tensor, grad: Tensor) -> Tensor:
    """Return rowsum(dO * O), float32 [batch, heads, length]."""
    batch, heads, length, head_dim = out.shape
    delta = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    _delta[(triton.cdiv(length, ROWS) * batch * heads,)](
        operand(out),
        operand(grad),
        delta,
        heads,
        length,
        WIDTH=head_dim,
        COLUMNS=padded(head_dim),
        BLOCK=ROWS,
        **OPTIONS,
    )
    return delta


@triton.jit
def _delta(out, grad, delta, heads, length, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    block, _, place, batch, head = block_and_head(length, heads, BLOCK)
    row = block * BLOCK
    o = load_tile(plane(out, batch, head), row, length, WIDTH, BLOCK, COLUMNS).to(tl.float32)
    g = load_tile(plane(grad, batch, head), row, length, WIDTH, BLOCK, COLUMNS).to(tl.float32)
    rows = row + tl.arange(0, BLOCK)
    tl.store(delta + place.to(tl.int64) * length + rows, tl.sum(o * g, 1), mask=rows < length)
