"""Flash attention with distance bands and bias formulas, as a differentiable function."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.attention_backward import backward
from megatron_coca.kernels.custom_op import operation
from megatron_coca.kernels.launch_constants import WIDEST, WIDEST_MAGNITUDES, AttentionCall, Operands, blocks_for
from megatron_coca.kernels.tiles import (
    block_and_head,
    constant_rows,
    key_phases,
    load_coefficients,
    load_tile,
    load_two,
    logits,
    operand,
    plane,
    start_of_document,
    store_tile,
    turns_of,
    unit_stride,
    zero_tile,
)


def forward(operands: Operands, plan: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp.

    The output has the query's dtype and, except for the width, its shape. A token's heads are adjacent in memory, so
    that joining them needs no copy. The log-sum-exp is float32 [batch, heads, query_length] to base 2.
    """
    query, launch = operands.query, plan.blocks.forward
    batch, heads, query_length, _ = query.shape
    out, lse = empty_results(query, operands.value)
    with torch.cuda.device_of(query):
        _attend[(triton.cdiv(query_length, launch.rows) * batch * heads,)](
            operands.tuples,
            operand(out),
            lse,
            operands.filled(operands.coefficients),
            operands.filled(operands.starts),
            operands.turns,
            operands.sizes,
            plan.limits,
            plan.scale,
            **plan.options(launch, operands),
        )
    return out, lse


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the results of `forward`."""
    batch, heads, length, _ = query.shape
    shape = (batch, length, heads, value.shape[3])
    out = torch.empty(shape, dtype=query.dtype, device=query.device).transpose(1, 2)
    return out, torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)


@triton.jit
def _attend(tensors, out, lse, coefficients, starts, turns, sizes, limits, scale, KIND: tl.constexpr):
    """Run one program per query block and head. The last blocks start first, because they see the most keys."""
    query, key, far_query, far_key, value = tensors
    heads, group, query_length, key_length = sizes
    block, blocks, place, batch, head = block_and_head(query_length, heads, KIND.rows)
    row = (blocks - 1 - block) * KIND.rows
    rows = row + tl.arange(0, KIND.rows)
    m = key_length - query_length + rows
    planes = (plane(query, batch, head), plane(far_query, batch, head))
    of_query = turns_of(turns[0], turns[2], batch, head, KIND)
    held = load_two(planes[0], planes[1], of_query, row, query_length, KIND.offset, True, KIND.far, KIND.rows, KIND)
    kv_head = head // group
    tiles = (plane(key, batch, kv_head), plane(far_key, batch, kv_head), plane(value, batch, kv_head))
    keys = (tiles[0], tiles[1], turns_of(turns[1], turns[2], batch, 0, KIND), tiles[2], key_length)
    start = start_of_document(starts, batch, m, key_length, KIND)[:, None]
    scoring = (limits, load_coefficients(coefficients, head, scale, KIND), scale * 1.4426950408889634)
    # The initial peak is finite, so a tile without visible keys does not change it, and -inf - -inf never occurs.
    state = (zero_tile(KIND.rows, KIND.value_columns), constant_rows(-1e30, KIND.rows), constant_rows(0.0, KIND.rows))
    phases = key_phases(key_length - query_length + row, starts, batch, key_length, limits, KIND)
    begin, far_end, edge, full, diagonal, end = phases
    if KIND.far:
        state = _tiles(state, begin, far_end, held, keys, m, start, scoring, False, True, KIND.first, KIND)
    if KIND.window and KIND.frequencies == 0:
        state = _tiles(state, edge, full, held, keys, m, start, scoring, True, KIND.far, True, KIND)
    if KIND.frequencies == 0:
        state = _tiles(state, full, diagonal, held, keys, m, start, scoring, True, False, False, KIND)
        state = _tiles(state, diagonal, end, held, keys, m, start, scoring, True, False, True, KIND)
    else:  # a second loop would need too many registers
        state = _tiles(state, edge, end, held, keys, m, start, scoring, True, False, True, KIND)
    acc, peak, total = state
    store_tile(acc / total[:, None], plane(out, batch, head), row, query_length, KIND.value_width)
    lse += place.to(tl.int64) * query_length
    tl.store(lse + rows, peak * scoring[2] + tl.log2(total), mask=rows < query_length)


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
    """Add the key tiles `begin` to `end` to (accumulator, largest unscaled score, sum of weights)."""
    acc, peak, total = state
    near, far, turns, values, key_length = keys
    limits, bias, scale = scoring
    for tile in range(begin, end):
        n = tile * KIND.keys + tl.arange(0, KIND.keys)[None, :]
        loaded = load_two(near, far, turns, tile * KIND.keys, key_length, False, NEAR, FAR, KIND.keys, KIND)
        v = load_tile(values, tile * KIND.keys, key_length, KIND.value_width, KIND.keys, KIND.value_columns)
        scores = logits(held, loaded, m[:, None], n, start, limits, bias, NEAR, FAR, MASKED or KIND.documents, KIND)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores * scale - (higher * scale)[:, None])
        shrink = tl.exp2((peak - higher) * scale)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher
    return acc, peak, total


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMULAS = ("linear", "log", "power")


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    far_query: Tensor | None = None,
    far_key: Tensor | None = None,
    window: int | None = None,
    first_keys: int | None = None,
    formula: str | None = None,
    coefficients: Tensor | None = None,
    starts: Tensor | None = None,
    tables: Sequence[Tensor] = (),
    offset: Tensor | None = None,
) -> Tensor:
    """Compute causal softmax(scale * Q' K'^T + bias) V, [batch, heads, query_length, width of V] in the query's dtype.

    The queries are the last `query_length` of the `key_length` tokens; r is the distance of a pair.

    Args:
        query: Q' [batch, heads, query_length, head_dim] for pairs with r < window.
        key: K' [batch, kv_heads, key_length, head_dim]; `heads` is a multiple of `kv_heads`.
        value: V, in the shape of `key`, except for its width, which may be smaller.
        scale: positive factor on the dot products; it must be positive because row maxima are computed before scaling.
        far_query, far_key: Q' and K' for pairs with r >= window, in the same shapes. Without them, these pairs are
            masked.
        window: the smallest distance of far pairs; None if `query` and `key` score all pairs.
        first_keys: if set, far pairs are limited to this number of keys at the start of the document.
        formula: name of the distance bias: "linear" -c0 r, "log" -c0 ln(1 + c1 r), "power" -c0 r^c1 (0 at r = 0).
        coefficients: c0 and c1 of each head, float32 [heads, 1 or 2]. Their gradients are computed if the tensor
            requires gradients.
        starts: for each token, the index of the first token of its document, int64 [batch, key_length], non-decreasing.
            Keys before a query's document are masked.
        tables: if given, `query` and `key` are magnitudes m, and the kernel computes (m cos, m sin) tile by tile:
            cos and sin of the queries, float32 [query_length, rotated] or [batch or 1, 1, query_length, rotated],
            followed by cos and sin of the keys in the corresponding shape. The features after the rotated ones have the
            angle 0.
        offset: with `tables`, constants that are subtracted from the angles of the queries, [heads, rotated].

    The softmax is computed in float32, and products of float32 operands are not rounded to TF32. Gradients are bitwise
    reproducible.

    Raises:
        ValueError: the shapes are inconsistent, or the head_dim, dtype or formula is not supported.
    """
    _check_operands(query, key, value, bool(tables))
    if tables and far_query is not None:
        raise ValueError("flash_attention: magnitudes are not supported with two segments")
    if formula is not None and formula not in FORMULAS:
        raise ValueError(f"flash_attention: formula must be one of {FORMULAS}, not {formula!r}")
    tensors = [x if x is None else unit_stride(x) for x in (query, key, far_query, far_key, value)]
    table = None if coefficients is None else _two_columns(coefficients)
    documents = None if starts is None else starts.contiguous()
    angles = None if offset is None else offset.float().contiguous()
    return _attention(*tensors, table, documents, angles, list(tables), scale, window, first_keys, formula or "none")[0]


def _check_operands(query: Tensor, key: Tensor, value: Tensor, magnitudes: bool) -> None:
    heads, query_length, head_dim = query.shape[1:]
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        dtypes = [x.dtype for x in (query, key, value)]
        raise ValueError(f"flash_attention: query, key and value must all be the same of {DTYPES}, not {dtypes}")
    if head_dim > (widest := WIDEST_MAGNITUDES if magnitudes else WIDEST):
        raise ValueError(f"flash_attention: head_dim {head_dim} is not supported; use up to {widest}")
    if key.shape[:3] != value.shape[:3] or value.shape[3] > head_dim or key.shape[::3] != query.shape[::3]:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ValueError(f"flash_attention: query, key and value must have matching shapes, not {shapes}")
    if heads % key.shape[1] != 0:
        raise ValueError(f"flash_attention: {heads} query heads cannot be divided among {key.shape[1]} key heads")
    if query_length > key.shape[2]:
        raise ValueError(f"flash_attention: there are more queries ({query_length}) than keys ({key.shape[2]})")


def _two_columns(coefficients: Tensor) -> Tensor:
    table = coefficients.float()
    return torch.nn.functional.pad(table, (0, 2 - table.shape[1])).contiguous()


def _run(
    query: Tensor,
    key: Tensor,
    far_query: Tensor | None,
    far_key: Tensor | None,
    value: Tensor,
    coefficients: Tensor | None,
    starts: Tensor | None,
    offset: Tensor | None,
    tables: list[Tensor],
    scale: float,
    window: int | None,
    first_keys: int | None,
    formula: str,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp to base 2."""
    operands = Operands(query, key, far_query, far_key, value, coefficients, starts, tuple(tables), offset)
    return forward(operands, _plan(operands, scale, window, first_keys, formula))


def _run_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    learned: bool,
    query: Tensor,
    key: Tensor,
    far_query: Tensor | None,
    far_key: Tensor | None,
    value: Tensor,
    coefficients: Tensor | None,
    starts: Tensor | None,
    offset: Tensor | None,
    tables: list[Tensor],
    scale: float,
    window: int | None,
    first_keys: int | None,
    formula: str,
) -> list[Tensor]:
    """Return the gradients of query, key, value, far query, far key, the coefficients if they are `learned`, and the
    constant angles.
    """
    operands = Operands(query, key, far_query, far_key, value, coefficients, starts, tuple(tables), offset)
    plan = _plan(operands, scale, window, first_keys, formula)
    grads, table = backward(operands, plan, out, lse, unit_stride(grad), learned)
    found = (grads.query, grads.key, grads.value, grads.far_query, grads.far_key, table, grads.offset)
    return [x for x in found if x is not None]


def _plan(operands: Operands, scale: float, window: int | None, first_keys: int | None, formula: str) -> AttentionCall:
    segments = 1 if operands.far_query is None else 2
    return AttentionCall(
        scale, window, first_keys, formula, blocks_for(operands.query, segments, bool(operands.tables))
    )


def _fake(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, rest[3])


def _fake_gradients(grad: Tensor, out: Tensor, lse: Tensor, learned: bool, *inputs: Any) -> list[Tensor]:
    query, key, far_query, far_key, value, coefficients, _, offset = inputs[:8]
    found = (query, key, value, far_query, far_key, coefficients if learned else None, offset)
    return [torch.empty_like(x) for x in found if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:8], *inputs[8])
    ctx.options = inputs[9:]


def _backward(ctx: Any, grad: Tensor, lse_grad: None) -> tuple[Tensor | None, ...]:
    out, lse, *saved = ctx.saved_tensors
    inputs, tables = saved[:8], saved[8:]
    learned = ctx.needs_input_grad[5]
    query, key, value, *rest = _attention_gradients(grad, out, lse, learned, *inputs, tables, *ctx.options)
    offset = rest.pop() if inputs[7] is not None else None
    far_query, far_key = rest[:2] if inputs[2] is not None else (None, None)
    table = rest[-1] if learned else None
    of_tables = [None for _ in tables]
    return query, key, far_query, far_key, value, table, None, offset, of_tables, *(None for _ in ctx.options)


_GIVEN = (
    "Tensor query, Tensor key, Tensor? far_query, Tensor? far_key, Tensor value, Tensor? coefficients, Tensor? starts, "
    "Tensor? offset, Tensor[] tables, float scale, int? window, int? first_keys, str formula"
)
_attention = operation(
    "flash_attention", f"({_GIVEN}) -> (Tensor, Tensor)", _run, _fake, keep=_keep, backward=_backward
)
_attention_gradients = operation(
    "flash_attention_gradients",
    f"(Tensor grad, Tensor out, Tensor lse, bool learned, {_GIVEN}) -> Tensor[]",
    _run_gradients,
    _fake_gradients,
)
