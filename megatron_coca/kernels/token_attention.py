"""Attention of one query per row over the slots of a cache. The keys are split into parts that run at the same time.

The number of keys is read on the device, so the launch is the same for every token and a CUDA graph can repeat it. A
key is loaded only for the segment that scores it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.launch_constants import WIDEST
from megatron_coca.kernels.tiles import operand, plane, unit_stride

BLOCK = 64
"""Number of keys per tile. It is halved if the tile would exceed `TILE_BYTES`."""
TILE_BYTES, PREFETCHED = 1 << 16, 1 << 15
"""Maximum bytes of a tile of keys and values in shared memory. Up to the second number, the kernel also prefetches the
next tile.
"""
PROGRAMS = 512
"""Number of programs that occupy a whole GPU. The keys are split until there are this many programs."""
ROWS = 16
"""Minimum rows of a matrix product in Triton; the queries of a key head are padded to this number."""
MOST_SEGMENTS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _scored(scores, query, key, segment, n, NUMBER: tl.constexpr, KIND: tl.constexpr):
    """Return `scores` [rows, keys] with the products of Q' and K' for the keys in segment NUMBER."""
    SIZE: tl.constexpr = KIND[0]
    GROUP: tl.constexpr = KIND[1]
    WIDTH: tl.constexpr = KIND[2]
    COLUMNS: tl.constexpr = KIND[3]
    row, column = tl.arange(0, SIZE), tl.arange(0, COLUMNS)
    inside = (row < GROUP)[:, None] & (column < WIDTH)[None, :]
    q = tl.load(query[0] + row[:, None] * query[1] + column[None, :], mask=inside, other=0.0)
    chosen = segment == NUMBER
    place = key[0] + n.to(tl.int64)[None, :] * key[1] + column[:, None]
    k = tl.load(place, mask=chosen[None, :] & (column < WIDTH)[:, None], other=0.0)
    return tl.where(chosen[None, :], tl.dot(q, k, input_precision="ieee"), scores)


@triton.jit
def _attend_part(
    queries,
    keys,
    value,
    segments,
    along,
    index,
    part,
    lse,
    sizes,
    scale,
    softcap,
    SEGMENTS: tl.constexpr,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    KIND: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Run one program per key head and part of the keys. It stores its output and the log-sum-exp of its scores."""
    SIZE: tl.constexpr = KIND[0]
    GROUP: tl.constexpr = KIND[1]
    kv_heads, extent, span, parts = sizes
    place, number = tl.program_id(0), tl.program_id(1)
    batch, head = place // kv_heads, place % kv_heads
    row, column = tl.arange(0, SIZE), tl.arange(0, VALUE_COLUMNS)
    first = number * span
    end = tl.minimum(tl.minimum(first + span, extent), tl.load(index).to(tl.int32) + 1)
    bias = along[0] + batch.to(tl.int64) * along[1] + (head * GROUP + row)[:, None] * along[2]
    values = plane(value, batch, head)
    acc = tl.zeros((SIZE, VALUE_COLUMNS), tl.float32)
    # The initial peak is finite, so a tile without visible keys does not change it, and -inf - -inf never occurs.
    peak, total = tl.full((SIZE,), -1e30, tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(first, end, KEYS):
        n = start + tl.arange(0, KEYS)
        segment = tl.load(segments + n, mask=n < end, other=-1)
        scores = tl.full((SIZE, KEYS), 0.0, tl.float32)
        scores = _scored(scores, plane(queries[0], batch, head), plane(keys[0], batch, head), segment, n, 0, KIND)
        if SEGMENTS > 1:
            scores = _scored(scores, plane(queries[1], batch, head), plane(keys[1], batch, head), segment, n, 1, KIND)
        if SEGMENTS > 2:
            scores = _scored(scores, plane(queries[2], batch, head), plane(keys[2], batch, head), segment, n, 2, KIND)
        scores = scores * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh
        if BIASED:
            scores += tl.load(bias + n[None, :], mask=(row < GROUP)[:, None] & (n < end)[None, :], other=0.0)
        seen = segment >= 0
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        where = values[0] + n.to(tl.int64)[:, None] * values[1] + column[None, :]
        v = tl.load(where, mask=seen[:, None] & (column < VALUE_WIDTH)[None, :], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher
    found = total > 0.0
    out = acc / tl.where(found, total, 1.0)[:, None]
    own = (place * parts + number) * GROUP + row
    tl.store(lse + own, tl.where(found, peak + tl.log(tl.where(found, total, 1.0)), float("-inf")), mask=row < GROUP)
    inside = (row < GROUP)[:, None] & (column < VALUE_WIDTH)[None, :]
    tl.store(part + own.to(tl.int64)[:, None] * VALUE_WIDTH + column[None, :], out, mask=inside)


@triton.jit
def _merge_parts(
    part,
    lse,
    sinks,
    out,
    heads,
    parts,
    SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Run one program per query head. It sums the outputs of the parts, weighted by their shares of the softmax."""
    place = tl.program_id(0)
    number, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    own = (place // GROUP * parts + number) * GROUP + place % GROUP
    inside = number < parts
    of_part = tl.load(lse + own, mask=inside, other=float("-inf"))
    peak = tl.max(of_part, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + place % heads)
        peak = tl.maximum(peak, sink)
    weights = tl.exp(of_part - peak)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    where = part + own.to(tl.int64)[:, None] * WIDTH + column[None, :]
    outs = tl.load(where, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)
    merged = tl.sum(outs * weights[:, None], 0) / total
    tl.store(out + place.to(tl.int64) * WIDTH + column, merged.to(out.dtype.element_ty), mask=column < WIDTH)


def unsupported(operands: Sequence[tuple[Tensor, Tensor]], value: Tensor) -> str | None:
    """Return None, or the reason why the kernel does not support these operands."""
    query, _ = operands[0]
    if query.dtype not in DTYPES:
        return f"the dtype {query.dtype}"
    if len(operands) > MOST_SEGMENTS:
        return f"{len(operands)} segments"
    if max(query.shape[3], value.shape[3]) > WIDEST:
        return f"operands with more than {WIDEST} features"
    return None


def token_attention(
    operands: Sequence[tuple[Tensor, Tensor]],
    value: Tensor,
    scale: float,
    segments: Tensor,
    along: Tensor | None,
    index: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale * Q' K'^T + bias) V of one query, [batch, heads, 1, width of V] in the query's dtype.

    The softmax is computed in float32. No keys are loaded beyond slot `index`.

    Args:
        operands: Q' [batch, heads, 1, head_dim] and K' [batch, kv_heads, slots, head_dim] of each segment, at most 3;
            `heads` is a multiple of `kv_heads`.
        value: V [batch, kv_heads, slots, width of V].
        segments: int32 [slots], the number of the segment that scores each slot, or a negative number to hide it.
        along: bias of each slot, [heads, slots] or [batch, heads, slots], or None.
        index: int64 [1]; slots beyond it are hidden.
        softcap: c, or None. Scaled scores s become c tanh(s / c) before the bias is added.
        sinks: the score of an additional key with value 0 in each head, [heads], or None.

    Raises:
        ValueError: the operands are not supported.
    """
    if (reason := unsupported(operands, value)) is not None:
        raise ValueError(f"token_attention: {reason} are not supported; use PyTorch operations")
    (batch, heads, _, width), (kv_heads, extent, value_width) = operands[0][0].shape, value.shape[1:]
    group, device = heads // kv_heads, value.device
    columns, value_columns = (max(16, triton.next_power_of_2(size)) for size in (width, value_width))
    key_bytes = (len(operands) * columns + value_columns) * value.element_size()
    block = BLOCK if key_bytes * BLOCK <= TILE_BYTES else BLOCK // 2
    tiles = triton.cdiv(extent, block)
    parts = min(max(1, triton.cdiv(PROGRAMS, batch * kv_heads)), tiles)
    span = triton.cdiv(tiles, parts) * block
    parts = triton.cdiv(extent, span)
    queries, keys = zip(*[*operands, *[operands[0]] * (MOST_SEGMENTS - len(operands))], strict=True)
    grouped = [operand(unit_stride(x).reshape(batch, kv_heads, group, width)) for x in queries]
    bias = None if along is None else along.float().expand(batch, heads, extent)
    part = torch.empty(batch * kv_heads * parts * group, value_width, dtype=torch.float32, device=device)
    lse = torch.empty(batch * kv_heads * parts * group, dtype=torch.float32, device=device)
    out = torch.empty(batch, heads, 1, value_width, dtype=value.dtype, device=device)
    kind = (max(ROWS, triton.next_power_of_2(group)), group, width, columns)
    with torch.cuda.device_of(value):
        _attend_part[(batch * kv_heads, parts)](
            tuple(grouped),
            tuple(operand(unit_stride(x)) for x in keys),
            operand(unit_stride(value)),
            segments,
            (lse, 0, 0) if bias is None else (unit_stride(bias), *unit_stride(bias).stride()[:2]),
            index,
            part,
            lse,
            (kv_heads, extent, span, parts),
            scale,
            0.0 if softcap is None else softcap,
            SEGMENTS=len(operands),
            BIASED=bias is not None,
            CAPPED=softcap is not None,
            KIND=kind,
            VALUE_WIDTH=value_width,
            VALUE_COLUMNS=value_columns,
            KEYS=block,
            num_stages=2 if key_bytes * block <= PREFETCHED else 1,
        )
        _merge_parts[(batch * heads,)](
            part,
            lse,
            lse if sinks is None else sinks.float(),
            out,
            heads,
            parts,
            SINKS=sinks is not None,
            GROUP=group,
            WIDTH=value_width,
            COLUMNS=value_columns,
            PARTS=triton.next_power_of_2(parts),
        )
    return out
