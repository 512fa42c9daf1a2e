"""The kernels of operands.py: the score forms and their derivatives on one block of rows of one head."""

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_coca.kernels.tiles import load_tile, plane, store_tile


class Layout(NamedTuple):
    """What a kernel is compiled for: the form; features in a half of the rotary block and after it; rows of a block; and
    both numbers of features padded to powers of two.
    """

    form: str
    half: int
    tail: int
    rows: int
    half_block: int
    tail_block: int


@triton.jit
def forward_kernel(query, key, query_table, key_table, heads, query_length, key_length, LAYOUT: tl.constexpr):
    """Each side is (x, y) as operands, each table (cos, sin, stride of the batch, stride of a row)."""
    head = tl.program_id(0)
    if head < heads:
        _forward_head(query, query_table, head, query_length, True, LAYOUT)
    else:
        _forward_head(key, key_table, head - heads, key_length, False, LAYOUT)


@triton.jit
def backward_kernel(query, key, query_table, key_table, heads, query_length, key_length, LAYOUT: tl.constexpr):
    """Each side is (x, gradient of y, gradient of x) as operands, the tables as in the forward pass."""
    head = tl.program_id(0)
    if head < heads:
        _backward_head(query, query_table, head, query_length, True, LAYOUT)
    else:
        _backward_head(key, key_table, head - heads, key_length, False, LAYOUT)


@triton.jit
def _forward_head(side, table, head, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    start = tl.program_id(1) * LAYOUT.rows
    x = plane(side[0], tl.program_id(2), head)
    y = plane(side[1], tl.program_id(2), head)
    cos, sin = _load_table(table, start, length, LAYOUT)
    x1, x2 = _load_halves(x, start, length, LAYOUT)
    y1, y2 = _form(x1, x2, cos, sin, IS_QUERY, LAYOUT)
    _store_halves(y1, y2, y, start, length, LAYOUT)
    if LAYOUT.tail > 0:
        rest = _load_tail(x, start, length, LAYOUT)
        if LAYOUT.form != "rotary":
            rest = rest * rest if IS_QUERY else _relu(rest)
        store_tile(rest, (y[0] + 2 * LAYOUT.half, y[1]), start, length, LAYOUT.tail)


@triton.jit
def _backward_head(side, table, head, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    start = tl.program_id(1) * LAYOUT.rows
    x = plane(side[0], tl.program_id(2), head)
    grad = plane(side[1], tl.program_id(2), head)
    out = plane(side[2], tl.program_id(2), head)
    cos, sin = _load_table(table, start, length, LAYOUT)
    x1, x2 = _load_halves(x, start, length, LAYOUT)
    g1, g2 = _load_halves(grad, start, length, LAYOUT)
    d1, d2 = _form_gradients(x1, x2, g1, g2, cos, sin, IS_QUERY, LAYOUT)
    _store_halves(d1, d2, out, start, length, LAYOUT)
    if LAYOUT.tail > 0:
        rest = _load_tail(grad, start, length, LAYOUT)
        if LAYOUT.form != "rotary":
            value = _load_tail(x, start, length, LAYOUT)
            rest = 2 * value * rest if IS_QUERY else tl.where(value > 0, rest, 0.0)
        store_tile(rest, (out[0] + 2 * LAYOUT.half, out[1]), start, length, LAYOUT.tail)


@triton.jit
def _form(x1, x2, cos, sin, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.form == "rotary":
        return x1 * cos - x2 * sin, x2 * cos + x1 * sin
    elif IS_QUERY and LAYOUT.form == "coca":
        return x1 * (x1 * cos - x2 * sin), x2 * (x2 * cos + x1 * sin)
    elif IS_QUERY:
        square = x1 * x1 + x2 * x2
        return square * cos, square * sin
    else:
        u = _relu((x1 + x2) * 0.5)
        if LAYOUT.form == "coca":
            return u * (cos - sin), u * (cos + sin)
        else:
            return u * cos, u * sin


@triton.jit
def _form_gradients(x1, x2, g1, g2, cos, sin, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.form == "rotary":
        return g1 * cos + g2 * sin, g2 * cos - g1 * sin
    elif IS_QUERY and LAYOUT.form == "coca":
        crossed = (g2 - g1) * sin
        return 2 * g1 * x1 * cos + x2 * crossed, 2 * g2 * x2 * cos + x1 * crossed
    elif IS_QUERY:
        slope = 2 * (g1 * cos + g2 * sin)
        return slope * x1, slope * x2
    else:
        if LAYOUT.form == "coca":
            slope = g1 * (cos - sin) + g2 * (cos + sin)
        else:
            slope = g1 * cos + g2 * sin
        # Half to each member of the pair, and nothing where the average is not positive.
        shared = tl.where(x1 + x2 > 0, 0.5 * slope, 0.0)
        return shared, shared


@triton.jit
def _relu(x):
    # Written so that a NaN stays one: the maximum of a NaN and 0 would be 0.
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _load_table(table, start, length, LAYOUT: tl.constexpr):
    offset = tl.program_id(2).to(tl.int64) * table[2]
    cos = load_tile((table[0] + offset, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    sin = load_tile((table[1] + offset, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    return cos, sin


@triton.jit
def _load_halves(x, start, length, LAYOUT: tl.constexpr):
    x1 = load_tile(x, start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    x2 = load_tile((x[0] + LAYOUT.half, x[1]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _load_tail(x, start, length, LAYOUT: tl.constexpr):
    place = (x[0] + 2 * LAYOUT.half, x[1])
    return load_tile(place, start, length, LAYOUT.tail, LAYOUT.rows, LAYOUT.tail_block).to(tl.float32)


@triton.jit
def _store_halves(y1, y2, y, start, length, LAYOUT: tl.constexpr):
    store_tile(y1, y, start, length, LAYOUT.half)
    store_tile(y2, (y[0] + LAYOUT.half, y[1]), start, length, LAYOUT.half)
