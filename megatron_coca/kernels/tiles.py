"""Operands with their strides, tiles in and out of memory, and matrix products: what all kernels share.

An operand travels into a kernel as a tuple (tensor, strides of batch, head and row); its last dimension is
contiguous. Row numbers are 32-bit inside a tile and 64-bit between tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every launch: a product and a sum may become one instruction with one rounding."""


def operand(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The tuple by which `x` [batch, heads, length, head_dim] enters a kernel."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def unit_stride(x: Tensor) -> Tensor:
    """`x`, copied only where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def plane(x, batch, head):
    """(pointer to row 0, stride of a row) of one head."""
    return x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2], x[3]


@triton.jit
def load_tile(x, start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] from row `start` of a plane, zero beyond `length` rows and WIDTH columns."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    pointers = x[0] + tl.cast(start, tl.int64) * x[1] + rows[:, None] * x[1] + columns[None, :]
    inside = (start + rows < length)[:, None]
    if WIDTH < COLUMNS:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(tile, x, start, length, WIDTH: tl.constexpr):
    """The inverse of `load_tile`: one rounding to the type of the memory, nothing written beyond the edges."""
    rows = tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    pointers = x[0] + tl.cast(start, tl.int64) * x[1] + rows[:, None] * x[1] + columns[None, :]
    inside = (start + rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def load_two(near, far, start, length, NEAR: tl.constexpr, FAR: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):
    """The tiles at row `start` of the segments in use; where one is not, the other stands in for it."""
    if NEAR:
        near_tile = load_tile(near, start, length, KIND.width, ROWS, KIND.columns)
    if FAR:
        far_tile = load_tile(far, start, length, KIND.width, ROWS, KIND.columns)
    if not NEAR:
        near_tile = far_tile
    if not FAR:
        far_tile = near_tile
    return near_tile, far_tile


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] float32."""
    # Its own function, because Triton 3.6 takes only compile-time arguments for a shape, not fields of one.
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def constant_rows(value, ROWS: tl.constexpr):
    """[ROWS] float32, all `value`."""
    return tl.full([ROWS], value, tl.float32)


@triton.jit
def dot(a, b):
    """a b in float32; float32 operands are not rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee")
