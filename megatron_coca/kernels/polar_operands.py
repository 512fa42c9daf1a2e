"""Fused kernels that compute Q' and K' of the polar score forms for all segments in one launch, and their gradients.

Every term has a magnitude and an angle a, which is position times frequency. A query subtracts its constant delta:

    Q' = (m cos(a - delta), m sin(a - delta))     K' = (u cos a, u sin a)

x1 and x2 are the halves of the rotary block. The magnitudes m of the query and u of the key are, by `magnitude`:

    softplus     m = softplus(x)^power              u = softplus(x)               for every feature x
    relu_mean    m = (x1^2 + x2^2)^(power / 2)      u = relu((x1 + x2) / 2)       for every pair of features

There is a frequency for every feature or for every pair. With softplus and a frequency per pair, both features of a
pair have the same angle; with relu_mean and a frequency per feature, both angles of a pair have the same magnitude. The
features after the rotary block are copied with softplus. With relu_mean they become |q|^power and relu(t). The kernels
compute in float32 and round once. PoPE is from Gopalakrishnan et al. 2025, CoCA-Strict from Zhu et al. 2024.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.custom_op import operation
from megatron_coca.kernels.operands import (
    block_sizes,
    empty_operand,
    head_and_place,
    launch,
    load_pair_halves,
    load_tail,
    relu,
    store_halves,
    unsupported,
)
from megatron_coca.kernels.tiles import load_tile, plane, store_tile, unit_stride


class PolarLayout(NamedTuple):
    """Compile-time constants of a kernel.

    Attributes:
        softplus: whether every feature has its own magnitude, instead of every pair.
        power: power of the query's magnitude.
        parts: 1, or 2 if the terms of the first features of all pairs are followed by those of the second features.
        shared: whether both parts have the same angles.
        turned: whether constants are subtracted from the angles of the query.
        learned: whether the backward pass computes the gradients of these constants.
        segments, half, tail, rows, half_block, tail_block: the fields of `operands.OperandLayout`.
    """

    softplus: bool
    power: int
    parts: int
    shared: bool
    turned: bool
    learned: bool
    segments: int
    half: int
    tail: int
    rows: int
    half_block: int
    tail_block: int


@triton.jit
def polar_forward_kernel(query, key, query_tables, key_tables, angles, sizes, LAYOUT: tl.constexpr):
    """Compute Q' and K'. `query` is (q, Q' of each segment) and `key` is (k, K' of each segment), as operands. A table
    is (cos, sin, batch stride, row stride). `angles` has cos and sin of the constant angles, [2, heads, terms].
    `head_and_place` describes `sizes`.
    """
    head, place = head_and_place(sizes, LAYOUT.rows)
    heads, _, query_length, key_length = sizes
    if head < heads:
        _forward_head(query, query_tables, angles, head, heads, place, query_length, True, LAYOUT)
    else:
        _forward_head(key, key_tables, angles, head - heads, heads, place, key_length, False, LAYOUT)


@triton.jit
def polar_backward_kernel(query, key, query_tables, key_tables, angles, turns, sizes, LAYOUT: tl.constexpr):
    """Compute the gradients of q and k. `query` is (q, gradient of q, gradient of Q' of each segment), and `key` has
    the same tensors for k. `turns` receives the gradients of the constant angles from each block of rows, [batch,
    blocks, heads, terms].
    """
    head, place = head_and_place(sizes, LAYOUT.rows)
    heads, _, query_length, key_length = sizes
    if head < heads:
        _backward_head(query, query_tables, angles, turns, head, heads, place, query_length, True, LAYOUT)
    else:
        _backward_head(key, key_tables, angles, turns, head - heads, heads, place, key_length, False, LAYOUT)


@triton.jit
def _forward_head(side, tables, angles, head, heads, place, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    SEGMENTS: tl.constexpr = LAYOUT.segments  # Triton 3.6's static_range does not accept a field
    PARTS: tl.constexpr = LAYOUT.parts
    batch = place[0]
    start = place[1] * LAYOUT.rows
    x = plane(side[0], batch, head)
    x1, x2 = load_pair_halves(x, start, length, LAYOUT)
    for segment in tl.static_range(SEGMENTS):
        y = plane(side[1 + segment], batch, head)
        for part in tl.static_range(PARTS):
            m = _magnitude(x1, x2, part, IS_QUERY, LAYOUT)
            cos, sin = _turned(tables[segment], angles, head, heads, batch, start, length, part, IS_QUERY, LAYOUT)
            store_tile(m * cos, (y[0] + part * LAYOUT.half, y[1]), start, length, LAYOUT.half)
            store_tile(m * sin, (y[0] + (PARTS + part) * LAYOUT.half, y[1]), start, length, LAYOUT.half)
        if LAYOUT.tail > 0:
            rest = load_tail(x, start, length, LAYOUT)
            store_tile(
                _rest(rest, IS_QUERY, LAYOUT), (y[0] + 2 * PARTS * LAYOUT.half, y[1]), start, length, LAYOUT.tail
            )


@triton.jit
def _backward_head(
    side, tables, angles, turns, head, heads, place, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr
):
    SEGMENTS: tl.constexpr = LAYOUT.segments
    PARTS: tl.constexpr = LAYOUT.parts
    batch = place[0]
    start = place[1] * LAYOUT.rows
    x = plane(side[0], batch, head)
    out = plane(side[1], batch, head)
    x1, x2 = load_pair_halves(x, start, length, LAYOUT)
    d1 = tl.zeros_like(x1)
    d2 = tl.zeros_like(x2)
    for part in tl.static_range(PARTS):
        of_magnitude = tl.zeros_like(x1)
        across = tl.zeros_like(x1)
        for segment in tl.static_range(SEGMENTS):
            grad = plane(side[2 + segment], batch, head)
            cos, sin = _turned(tables[segment], angles, head, heads, batch, start, length, part, IS_QUERY, LAYOUT)
            by_cos = _load_part(grad, part, start, length, LAYOUT)
            by_sin = _load_part(grad, PARTS + part, start, length, LAYOUT)
            of_magnitude += by_cos * cos + by_sin * sin
            across += by_cos * sin - by_sin * cos
        if IS_QUERY and LAYOUT.learned:
            m = _magnitude(x1, x2, part, IS_QUERY, LAYOUT)
            _store_turns(tl.sum(m * across, 0), turns, part, head, heads, place, LAYOUT)
        if LAYOUT.softplus:
            if part == 0:
                d1 = of_magnitude * _slope(x1, IS_QUERY, LAYOUT)
            else:
                d2 = of_magnitude * _slope(x2, IS_QUERY, LAYOUT)
        else:
            s1, s2 = _pair_slopes(x1, x2, IS_QUERY, LAYOUT)
            d1 += of_magnitude * s1
            d2 += of_magnitude * s2
    store_halves(d1, d2, out, start, length, LAYOUT)
    if LAYOUT.tail > 0:
        rest = _load_rest(side[2], batch, head, start, length, LAYOUT)
        for segment in tl.static_range(1, SEGMENTS):
            rest += _load_rest(side[2 + segment], batch, head, start, length, LAYOUT)
        slope = _rest_slope(load_tail(x, start, length, LAYOUT), rest, IS_QUERY, LAYOUT)
        store_tile(slope, (out[0] + 2 * LAYOUT.half, out[1]), start, length, LAYOUT.tail)


@triton.jit
def _magnitude(x1, x2, PART: tl.constexpr, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.softplus:
        m = _softplus(x1 if PART == 0 else x2)
        return m * m if IS_QUERY and LAYOUT.power == 2 else m
    elif not IS_QUERY:
        return relu((x1 + x2) * 0.5)
    else:
        square = x1 * x1 + x2 * x2
        return square if LAYOUT.power == 2 else tl.sqrt_rn(square)


@triton.jit
def _slope(x, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the derivative of softplus(x), or of its square."""
    small = _exp_of_minus_abs(x)
    sigmoid = tl.div_rn(tl.where(x < 0, small, 1.0), 1.0 + small)
    return 2 * _softplus(x) * sigmoid if IS_QUERY and LAYOUT.power == 2 else sigmoid


@triton.jit
def _pair_slopes(x1, x2, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the derivatives of a pair's magnitude with respect to x1 and x2."""
    if not IS_QUERY:
        # Each member of the pair gets half of the gradient; a pair without a positive mean has gradient 0.
        shared = tl.where(x1 + x2 > 0, 0.5, 0.0)
        return shared, shared
    elif LAYOUT.power == 2:
        return 2 * x1, 2 * x2
    else:
        length = tl.sqrt_rn(x1 * x1 + x2 * x2)
        inverse = tl.where(length == 0, 0.0, 1.0 / tl.where(length == 0, 1.0, length))
        return x1 * inverse, x2 * inverse


@triton.jit
def _rest(x, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.softplus:
        return x
    elif not IS_QUERY:
        return relu(x)
    else:
        return x * x if LAYOUT.power == 2 else tl.abs(x)


@triton.jit
def _rest_slope(x, grad, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    if LAYOUT.softplus:
        return grad
    elif not IS_QUERY:
        return tl.where(x > 0, grad, 0.0)
    elif LAYOUT.power == 2:
        return 2 * x * grad
    else:
        return tl.where(x > 0, grad, tl.where(x < 0, -grad, 0.0))


@triton.jit
def _softplus(x):
    """Return max(x, 0) + ln(1 + e), e = exp(-|x|), with a small relative error even if e is small.

    ln(1 + e) = 2 atanh(s) with s = e / (2 + e) <= 1/3, as a series with a remainder below 2e-9 of the result. The
    logarithm of the hardware has an absolute error, which would be larger than softplus(x) for very negative x.
    """
    e = _exp_of_minus_abs(x)
    s = tl.div_rn(e, 2.0 + e)
    square = s * s
    series = 1 / 13 + square * (1 / 15 + square * (1 / 17))
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11 + square * series))
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * series))
    return tl.where(x < 0, 0.0, x) + 2 * s * series


@triton.jit
def _exp_of_minus_abs(x):
    """Return exp(-|x|) as 2^n exp(r) with |r| <= ln(2) / 2 (Cody and Waite 1980). With the hardware's exp2 on its own,
    the relative error would grow with |x|, because the argument is rounded.
    """
    a = -tl.abs(x)
    a = tl.where(a < -150.0, -150.0, a)  # exp is 0 there; keeps NaN
    n = tl.floor(a * 1.4426950408889634 + 0.5)
    r = (a - n * 0.693145751953125) - n * 1.428606765330187e-06  # ln(2) in two parts; the first product is exact
    return tl.exp2(r * 1.4426950408889634) * tl.exp2(n)


@triton.jit
def _turned(
    table, angles, head, heads, batch, start, length, PART: tl.constexpr, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr
):
    """Load cos and sin of the angles of one part. For a query, subtract the constants of its head from the angles."""
    column = 0 if LAYOUT.shared else PART * LAYOUT.half
    skipped = tl.cast(batch, tl.int64) * table[2] + column
    cos = load_tile((table[0] + skipped, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    sin = load_tile((table[1] + skipped, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    if IS_QUERY and LAYOUT.turned:
        columns = tl.arange(0, LAYOUT.half_block)
        terms = LAYOUT.parts * LAYOUT.half
        place = angles + head * terms + PART * LAYOUT.half + columns
        inside = columns < LAYOUT.half
        by_cos = tl.load(place, mask=inside, other=1.0)[None, :]
        by_sin = tl.load(place + heads * terms, mask=inside, other=0.0)[None, :]
        turned = cos * by_cos + sin * by_sin
        sin = sin * by_cos - cos * by_sin
        cos = turned
    return cos, sin


@triton.jit
def _load_part(x, PART: tl.constexpr, start, length, LAYOUT: tl.constexpr):
    place = (x[0] + PART * LAYOUT.half, x[1])
    return load_tile(place, start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block).to(tl.float32)


@triton.jit
def _load_rest(grad, batch, head, start, length, LAYOUT: tl.constexpr):
    x = plane(grad, batch, head)
    place = (x[0] + 2 * LAYOUT.parts * LAYOUT.half, x[1])
    return load_tile(place, start, length, LAYOUT.tail, LAYOUT.rows, LAYOUT.tail_block).to(tl.float32)


@triton.jit
def _store_turns(sums, turns, PART: tl.constexpr, head, heads, place, LAYOUT: tl.constexpr):
    columns = tl.arange(0, LAYOUT.half_block)
    block = tl.cast(place[0], tl.int64) * place[2] + place[1]
    row = turns + (block * heads + head) * (LAYOUT.parts * LAYOUT.half) + PART * LAYOUT.half
    tl.store(row + columns, sums, mask=columns < LAYOUT.half)


Magnitude = Literal["softplus", "relu_mean"]
ELEMENTS = 2048
"""Number of elements of an operand that a program processes. It is half of `operands.ELEMENTS`, because Q' and K' are
twice as wide.
"""


class Terms(NamedTuple):
    """Magnitudes and frequencies of a polar form: `features` is the number of rotated features per frequency."""

    magnitude: Magnitude
    power: int
    features: int


def polar_operands(
    q: Tensor, k: Tensor, tables: Sequence[Tensor], terms: Terms, offset: Tensor | None = None
) -> list[Tensor]:
    """Compute Q' and K' of all segments, in order, in the dtype of q and k. They have two features for each term, and a
    token's heads are adjacent in memory.

    Args:
        q: [batch, heads, query_length, head_dim] with a contiguous last dimension and any other strides.
        k: [batch, kv_heads, key_length, head_dim] with a contiguous last dimension.
        tables: the tables that `fused_operands` describes, with one column for each frequency.
        terms: a form in the module docstring.
        offset: constants that are subtracted from the angles of q, in radians, [heads, number of terms].

    Gradients flow to q, k and offset but not to the tables. Only the arguments are saved for the backward pass.

    Raises:
        ValueError: `unsupported` returns a reason, or the tables or the offset have a wrong shape.
    """
    reason = unsupported(q, k, tables) or _misshapen(q, tables, terms, offset)
    if reason is not None:
        raise ValueError(f"polar_operands: {reason}")
    angles = None if offset is None else offset.float()
    return _operands(q, k, angles, list(tables), terms.magnitude, terms.power, terms.features)


def _misshapen(q: Tensor, tables: Sequence[Tensor], terms: Terms, offset: Tensor | None) -> str | None:
    rotated = terms.features * tables[0].shape[-1]
    if rotated % 2 or rotated > q.shape[-1]:
        return f"{rotated} features cannot rotate in heads of {q.shape[-1]}"
    shape = (q.shape[1], _parts(terms) * rotated // 2)
    if offset is not None and tuple(offset.shape) != shape:
        return f"offset must have the shape {shape}, not {tuple(offset.shape)}"
    return None


def _parts(terms: Terms) -> int:
    return 1 if (terms.magnitude, terms.features) == ("relu_mean", 2) else 2


def _make(
    q: Tensor, k: Tensor, offset: Tensor | None, tables: list[Tensor], magnitude: Any, power: int, features: int
) -> list[Tensor]:
    terms = Terms(magnitude, power, features)
    made = _empty(q, k, tables, terms)
    layout = _layout(q, k, tables, terms, offset, False)
    launch(polar_forward_kernel, (q, *made[::2]), (k, *made[1::2]), tables, layout, _cos_and_sin(offset))
    return made


def _fake(q: Tensor, k: Tensor, offset: Tensor | None, tables: list[Tensor], *terms: Any) -> list[Tensor]:
    return _empty(q, k, tables, Terms(*terms))


def _empty(q: Tensor, k: Tensor, tables: list[Tensor], terms: Terms) -> list[Tensor]:
    half = terms.features * tables[0].shape[-1] // 2
    wider = (_parts(terms) - 1) * 2 * half
    return [empty_operand(x, x.shape[-1] + wider) for _ in range(len(tables) // 4) for x in (q, k)]


def _layout(
    q: Tensor, k: Tensor, tables: list[Tensor], terms: Terms, offset: Tensor | None, learned: bool
) -> PolarLayout:
    half = terms.features * tables[0].shape[-1] // 2
    form = terms.magnitude == "softplus", terms.power, _parts(terms), terms.features == 2, offset is not None, learned
    return PolarLayout(*form, len(tables) // 4, half, q.shape[-1] - 2 * half, *block_sizes(q, k, half, ELEMENTS))


def _cos_and_sin(offset: Tensor | None) -> Tensor | None:
    return None if offset is None else torch.stack((offset.cos(), offset.sin()))


def _make_gradients(
    made: list[Tensor],
    q: Tensor,
    k: Tensor,
    offset: Tensor | None,
    tables: list[Tensor],
    magnitude: Any,
    power: int,
    features: int,
    learned: bool,
) -> list[Tensor]:
    """Compute the gradients of q and k from `made`, the gradients of the operands. If the constant angles are
    `learned`, also compute their gradients.
    """
    layout = _layout(q, k, tables, Terms(magnitude, power, features), offset, learned)
    grads = torch.empty_like(q), torch.empty_like(k)
    turns = None
    if learned and offset is not None:
        blocks = triton.cdiv(max(q.shape[2], k.shape[2]), layout.rows)
        turns = torch.empty((q.shape[0], blocks, *offset.shape), dtype=torch.float32, device=q.device)
    of_queries, of_keys = ([unit_stride(grad) for grad in made[first::2]] for first in (0, 1))
    query, key = (q, grads[0], *of_queries), (k, grads[1], *of_keys)
    launch(polar_backward_kernel, query, key, tables, layout, _cos_and_sin(offset), turns)
    return [*grads] if turns is None else [*grads, turns.sum((0, 1), dtype=torch.float64).float()]


def _fake_gradients(made: list[Tensor], q: Tensor, k: Tensor, offset: Tensor | None, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, offset if rest[-1] else None) if x is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, offset, tables, *ctx.terms = inputs
    ctx.save_for_backward(q, k, offset, *tables)


def _backward(ctx: Any, made: list[Tensor]) -> tuple[Any, ...]:
    q, k, offset, *tables = ctx.saved_tensors
    learned = offset is not None and ctx.needs_input_grad[2]
    of_q, of_k, *of_offset = _operand_gradients(made, q, k, offset, tables, *ctx.terms, learned)
    return of_q, of_k, of_offset[0] if of_offset else None, [None for _ in tables], None, None, None


_GIVEN = "Tensor q, Tensor k, Tensor? offset, Tensor[] tables, str magnitude, int power, int features"
_operands = operation("polar_terms", f"({_GIVEN}) -> Tensor[]", _make, _fake, keep=_keep, backward=_backward)
_operand_gradients = operation(
    "polar_term_gradients",
    f"(Tensor[] made, {_GIVEN}, bool learned) -> Tensor[]",
    _make_gradients,
    _fake_gradients,
)
