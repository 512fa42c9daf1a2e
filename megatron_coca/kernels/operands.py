"""Fused kernels that compute Q' and K' of the rotary score forms for all segments in one launch, and their gradients.

x1 and x2 are the halves of the rotary block, c and s are the tables, and u = relu((t1 + t2) / 2):

    rotary       Q' = (x1 c - x2 s, x2 c + x1 s)               K' = the same formula for k
    coca         Q' = (x1 (x1 c - x2 s), x2 (x2 c + x1 s))     K' = (u (c - s), u (c + s))
    coca_strict  Q' = ((x1^2 + x2^2) c, (x1^2 + x2^2) s)       K' = (u c, u s)

In the form rotary, the features after the rotary block are copied; in both CoCA forms they become q^2 and relu(t). The
forms are from Su et al. 2021 and Zhu et al. 2024. The kernels compute in float32 and round once.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_coca.kernels.custom_op import operation
from megatron_coca.kernels.tiles import OPTIONS, load_tile, operand, plane, store_tile, table, unit_stride


class OperandLayout(NamedTuple):
    """Compile-time constants of a kernel: the form; the number of segments; the number of features in half of the
    rotary block and after the block; the rows per program; and both numbers of features padded to powers of two.
    """

    form: str
    segments: int
    half: int
    tail: int
    rows: int
    half_block: int
    tail_block: int


@triton.jit
def forward_kernel(query, key, query_tables, key_tables, sizes, LAYOUT: tl.constexpr):
    """Compute Q' and K'. `query` is (q, Q' of each segment) and `key` is (k, K' of each segment), as operands. A table
    is (cos, sin, batch stride, row stride). `head_and_place` describes `sizes`.
    """
    head, place = head_and_place(sizes, LAYOUT.rows)
    heads, _, query_length, key_length = sizes
    if head < heads:
        _forward_head(query, query_tables, head, place, query_length, True, LAYOUT)
    else:
        _forward_head(key, key_tables, head - heads, place, key_length, False, LAYOUT)


@triton.jit
def backward_kernel(query, key, query_tables, key_tables, sizes, LAYOUT: tl.constexpr):
    """Compute the gradients of q and k. `query` is (q, gradient of q, gradient of Q' of each segment), and `key` has
    the same tensors for k. The other arguments are those of `forward_kernel`.
    """
    head, place = head_and_place(sizes, LAYOUT.rows)
    heads, _, query_length, key_length = sizes
    if head < heads:
        _backward_head(query, query_tables, head, place, query_length, True, LAYOUT)
    else:
        _backward_head(key, key_tables, head - heads, place, key_length, False, LAYOUT)


@triton.jit
def head_and_place(sizes, ROWS: tl.constexpr):
    """Return (head, (batch row, row block, number of row blocks)) of this program. The heads of k are counted after
    those of q. `sizes` are (heads of q, heads of k, rows of q, rows of k).

    All indices share one dimension of the grid, because only the first dimension may exceed 65,535. Heads vary fastest,
    because all heads of a row block share its tables in the cache.
    """
    heads = sizes[0] + sizes[1]
    blocks = tl.cdiv(tl.maximum(sizes[2], sizes[3]), ROWS)
    place = tl.program_id(0) // heads
    return tl.program_id(0) % heads, (place // blocks, place % blocks, blocks)


@triton.jit
def _forward_head(side, tables, head, place, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    SEGMENTS: tl.constexpr = LAYOUT.segments  # Triton 3.6's static_range does not accept a field
    batch = place[0]
    start = place[1] * LAYOUT.rows
    x = plane(side[0], batch, head)
    x1, x2 = load_pair_halves(x, start, length, LAYOUT)
    for segment in tl.static_range(SEGMENTS):
        y = plane(side[1 + segment], batch, head)
        cos, sin = _load_table(tables[segment], batch, start, length, LAYOUT)
        y1, y2 = _form(x1, x2, cos, sin, IS_QUERY, LAYOUT)
        store_halves(y1, y2, y, start, length, LAYOUT)
        if LAYOUT.tail > 0:
            rest = load_tail(x, start, length, LAYOUT)
            if LAYOUT.form != "rotary":
                rest = rest * rest if IS_QUERY else relu(rest)
            store_tile(rest, (y[0] + 2 * LAYOUT.half, y[1]), start, length, LAYOUT.tail)


@triton.jit
def _backward_head(side, tables, head, place, length, IS_QUERY: tl.constexpr, LAYOUT: tl.constexpr):
    SEGMENTS: tl.constexpr = LAYOUT.segments
    batch = place[0]
    start = place[1] * LAYOUT.rows
    x = plane(side[0], batch, head)
    out = plane(side[1], batch, head)
    x1, x2 = load_pair_halves(x, start, length, LAYOUT)
    d1 = tl.zeros_like(x1)
    d2 = tl.zeros_like(x2)
    for segment in tl.static_range(SEGMENTS):
        grad = plane(side[2 + segment], batch, head)
        cos, sin = _load_table(tables[segment], batch, start, length, LAYOUT)
        g1, g2 = load_pair_halves(grad, start, length, LAYOUT)
        s1, s2 = _form_gradients(x1, x2, g1, g2, cos, sin, IS_QUERY, LAYOUT)
        d1 += s1
        d2 += s2
    store_halves(d1, d2, out, start, length, LAYOUT)
    if LAYOUT.tail > 0:
        rest = load_tail(plane(side[2], batch, head), start, length, LAYOUT)
        for segment in tl.static_range(1, SEGMENTS):
            rest += load_tail(plane(side[2 + segment], batch, head), start, length, LAYOUT)
        if LAYOUT.form != "rotary":
            value = load_tail(x, start, length, LAYOUT)
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
        u = relu((x1 + x2) * 0.5)
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
        # Each member of the pair gets half of the gradient; a pair without a positive mean has gradient 0.
        shared = tl.where(x1 + x2 > 0, 0.5 * slope, 0.0)
        return shared, shared


@triton.jit
def relu(x):
    # Keeps NaN; the maximum of NaN and 0 would be 0.
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _load_table(table, batch, start, length, LAYOUT: tl.constexpr):
    offset = tl.cast(batch, tl.int64) * table[2]
    cos = load_tile((table[0] + offset, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    sin = load_tile((table[1] + offset, table[3]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    return cos, sin


@triton.jit
def load_pair_halves(x, start, length, LAYOUT: tl.constexpr):
    x1 = load_tile(x, start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    x2 = load_tile((x[0] + LAYOUT.half, x[1]), start, length, LAYOUT.half, LAYOUT.rows, LAYOUT.half_block)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def load_tail(x, start, length, LAYOUT: tl.constexpr):
    place = (x[0] + 2 * LAYOUT.half, x[1])
    return load_tile(place, start, length, LAYOUT.tail, LAYOUT.rows, LAYOUT.tail_block).to(tl.float32)


@triton.jit
def store_halves(y1, y2, y, start, length, LAYOUT: tl.constexpr):
    store_tile(y1, y, start, length, LAYOUT.half)
    store_tile(y2, (y[0] + LAYOUT.half, y[1]), start, length, LAYOUT.half)


KernelForm = Literal["rotary", "coca", "coca_strict"]
FORMS = ("rotary", "coca", "coca_strict")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ELEMENTS = 4096
"""Number of elements of an operand that a program processes. Divided by the width of a head, it is the number of rows.
"""


def fused_operands(q: Tensor, k: Tensor, tables: Sequence[Tensor], form: KernelForm) -> list[Tensor]:
    """Compute Q' and K' of all segments, in order. They have the shapes and dtype of q and k, and a token's heads are
    adjacent in memory.

    Args:
        q: [batch, heads, query_length, head_dim] with a contiguous last dimension and any other strides.
        k: [batch, kv_heads, key_length, head_dim] with a contiguous last dimension. For CoCA, it is t.
        tables: for each segment, cos and sin of the queries, float32 [query_length, rotated / 2] or [batch or 1, 1,
            query_length, rotated / 2], followed by cos and sin of the keys in the corresponding shape.
        form: the name of a form in the module docstring.

    Gradients flow to q and k but not to the tables. Only the arguments are saved for the backward pass. torch.compile
    sees one operation in the forward pass and one in the backward pass.

    Raises:
        ValueError: the form is unknown, or `unsupported` returns a reason.
    """
    reason = unsupported(q, k, tables) if form in FORMS else f"form must be one of {', '.join(FORMS)}, not {form!r}"
    if reason is not None:
        raise ValueError(f"fused_operands: {reason}")
    return _operands(q, k, list(tables), form)


def unsupported(q: Tensor, k: Tensor, tables: Sequence[Tensor]) -> str | None:
    """Return None, or the reason why the kernels do not support these arguments."""
    if q.dtype not in DTYPES or k.dtype != q.dtype:
        return f"q and k must both be float32, bfloat16 or float16, not {q.dtype} and {k.dtype}"
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        return "the last dimension of q and k must be contiguous"
    if any(table.dtype != torch.float32 for table in tables):
        return "the tables must be float32"
    if any(table.requires_grad for table in tables):
        return "the tables are learned, but the kernel does not compute their gradients"
    rows = (q.shape[2], q.shape[2], k.shape[2], k.shape[2]) * (len(tables) // 4)
    if any(table.shape[-2] != length for table, length in zip(tables, rows, strict=True)):
        return f"the tables must have one row per token, {rows}, not {tuple(table.shape[-2] for table in tables)}"
    return None


def _make_operands(q: Tensor, k: Tensor, tables: list[Tensor], form: str) -> list[Tensor]:
    made = _empty_operands(q, k, tables)
    _launch(forward_kernel, (q, *made[::2]), (k, *made[1::2]), tables, form)
    return made


def _fake(q: Tensor, k: Tensor, tables: list[Tensor], form: str) -> list[Tensor]:
    return _empty_operands(q, k, tables)


def _empty_operands(q: Tensor, k: Tensor, tables: list[Tensor]) -> list[Tensor]:
    return [empty_operand(x, x.shape[-1]) for _ in range(len(tables) // 4) for x in (q, k)]


def empty_operand(x: Tensor, width: int) -> Tensor:
    """Allocate an operand in which a token's heads are adjacent in memory. The attention output has the layout of Q',
    so joining its heads then needs no copy.
    """
    batch, heads, length, _ = x.shape
    return torch.empty((batch, length, heads, width), dtype=x.dtype, device=x.device).transpose(1, 2)


def _make_gradients(made: list[Tensor], q: Tensor, k: Tensor, tables: list[Tensor], form: str) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q and k from `made`, the gradients of the operands."""
    grads = torch.empty_like(q), torch.empty_like(k)
    of_queries, of_keys = ([unit_stride(grad) for grad in made[first::2]] for first in (0, 1))
    _launch(backward_kernel, (q, grads[0], *of_queries), (k, grads[1], *of_keys), tables, form)
    return grads


def _fake_gradients(made: list[Tensor], q: Tensor, k: Tensor, tables: list[Tensor], form: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, list[Tensor], str], output: list[Tensor]) -> None:
    q, k, tables, ctx.form = inputs
    ctx.save_for_backward(q, k, *tables)


def _backward(ctx: Any, made: list[Tensor]) -> tuple[Tensor, Tensor, list[None], None]:
    q, k, *tables = ctx.saved_tensors
    return *_operand_gradients(made, q, k, tables, ctx.form), [None for _ in tables], None


_GIVEN = "Tensor q, Tensor k, Tensor[] tables, str form"
_operands = operation(
    "segment_operands", f"({_GIVEN}) -> Tensor[]", _make_operands, _fake, keep=_keep, backward=_backward
)
_operand_gradients = operation(
    "segment_operand_gradients",
    f"(Tensor[] made, {_GIVEN}) -> (Tensor, Tensor)",
    _make_gradients,
    _fake_gradients,
)


def _launch(
    kernel: Any, query: tuple[Tensor, ...], key: tuple[Tensor, ...], tables: Sequence[Tensor], form: str
) -> None:
    half, head_dim = tables[0].shape[-1], query[0].shape[-1]
    layout = OperandLayout(form, len(tables) // 4, half, head_dim - 2 * half, *block_sizes(query[0], key[0], half))
    launch(kernel, query, key, tables, layout)


def launch(
    kernel: Any,
    query: tuple[Tensor, ...],
    key: tuple[Tensor, ...],
    tables: Sequence[Tensor],
    layout: Any,
    *others: Tensor | None,
) -> None:
    """Launch one program per head of q or k, row block and batch row."""
    (batch, heads, query_length, _), (_, kv_heads, key_length, _) = query[0].shape, key[0].shape
    if batch == 0 or max(query_length, key_length) == 0:
        return
    # The tables of each segment: cos and sin of the queries, then cos and sin of the keys.
    pairs = [table(*pair, batch) for pair in zip(tables[::2], tables[1::2], strict=True)]
    with torch.cuda.device_of(query[0]):
        kernel[((heads + kv_heads) * triton.cdiv(max(query_length, key_length), layout.rows) * batch,)](
            tuple(operand(x) for x in query),
            tuple(operand(x) for x in key),
            tuple(pairs[::2]),
            tuple(pairs[1::2]),
            *others,
            (heads, kv_heads, query_length, key_length),
            LAYOUT=layout,
            **OPTIONS,
        )


def block_sizes(q: Tensor, k: Tensor, half: int, elements: int = ELEMENTS) -> tuple[int, int, int]:
    """Return the rows per program, and the numbers of features in half of the rotary block and after the block, padded
    to powers of two. A program processes about `elements` elements, but not more than all rows.
    """
    tail = q.shape[-1] - 2 * half
    half_block = triton.next_power_of_2(half)
    tail_block = triton.next_power_of_2(tail) if tail else 0
    fitting = 1 << ((elements // (2 * half_block + tail_block)).bit_length() - 1)
    return min(fitting, triton.next_power_of_2(max(q.shape[2], k.shape[2], 1))), half_block, tail_block
