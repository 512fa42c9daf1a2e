"""Functions that all kernels share: operands with strides, tile loads and stores, matrix products.

A kernel takes an operand as a tuple (tensor, batch stride, head stride, row stride); the last dimension is contiguous.
Row numbers are 32-bit within a tile and 64-bit between tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every launch: a multiplication and an addition may be fused into one instruction (FMA)."""


def operand(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Turn `x` [batch, heads, length, head_dim] into the tuple that a kernel takes."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def table(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor, int, int]:
    """Return (cos, sin, batch stride, row stride); the batch stride is 0 if the whole batch shares one table."""
    cos, sin = cos.contiguous(), sin.contiguous()
    own = cos.dim() == 4 and cos.shape[0] == batch
    return cos, sin, cos.stride(0) if own else 0, cos.stride(-2)


def unit_stride(x: Tensor) -> Tensor:
    """Return `x`, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def plane(x, batch, head):
    """Return (pointer to row 0, row stride) of one head."""
    return x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2], x[3]


@triton.jit
def load_tile(x, start, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load [ROWS, COLUMNS] from row `start` of a plane, with zeros beyond `length` rows and WIDTH columns."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    pointers = x[0] + tl.cast(start, tl.int64) * x[1] + rows[:, None] * x[1] + columns[None, :]
    inside = (start + rows < length)[:, None]
    if WIDTH < COLUMNS:
        inside = inside & (columns < WIDTH)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def store_tile(tile, x, start, length, WIDTH: tl.constexpr):
    """Store a tile where `load_tile` would load it. Round once to the memory dtype. Write nothing beyond the edges."""
    rows = tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    pointers = x[0] + tl.cast(start, tl.int64) * x[1] + rows[:, None] * x[1] + columns[None, :]
    inside = (start + rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def turns_of(table, offset, batch, head, KIND: tl.constexpr):
    """Return (pointer to cos, pointer to sin, row stride, pointer to the constant angles of the head)."""
    skipped = tl.cast(batch, tl.int64) * table[2]
    return table[0] + skipped, table[1] + skipped, table[3], offset + 2 * KIND.frequencies * head


@triton.jit
def load_turns(turns, start, length, TURNED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):
    """Load cos and sin of the angles of each magnitude, [ROWS, columns of magnitudes]. Features that are not rotated
    have the angle 0. With TURNED, the head's constant angles are subtracted.
    """
    columns = tl.arange(0, KIND.columns)
    cos = load_tile((turns[0], turns[2]), start, length, KIND.frequencies, ROWS, KIND.columns)
    sin = load_tile((turns[1], turns[2]), start, length, KIND.frequencies, ROWS, KIND.columns)
    if TURNED:
        rotated = columns < KIND.frequencies
        by_cos = tl.load(turns[3] + columns, mask=rotated, other=1.0)[None, :]
        by_sin = tl.load(turns[3] + KIND.frequencies + columns, mask=rotated, other=0.0)[None, :]
        turned = cos * by_cos + sin * by_sin
        sin = sin * by_cos - cos * by_sin
        cos = turned
    if KIND.frequencies < KIND.width:
        cos = tl.where((columns < KIND.frequencies)[None, :], cos, 1.0)
    return cos, sin


@triton.jit
def loaded_layout(tile):
    """Return the tile, computed in the layout in which its parts were loaded.

    Otherwise Triton would compute it in the layout of an operand of a matrix product, and would then need cos and sin
    in every warp's registers. Triton does not move a layout across a sum, so the tile is summed over a dimension of
    size 1, which costs nothing.
    """
    return tl.sum(tile[:, :, None], 2)


@triton.jit
def load_halves(x, turns, start, length, TURNED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):
    """Load a tile of Q' or K', and return it twice. If `x` has magnitudes m, return the halves of the tile instead: m
    cos and m sin, rounded once.
    """
    m = load_tile(x, start, length, KIND.width, ROWS, KIND.columns)
    if KIND.frequencies == 0:
        return m, m
    else:
        cos, sin = load_turns(turns, start, length, TURNED, ROWS, KIND)
        wide = m.to(tl.float32)
        return loaded_layout(wide * cos).to(m.dtype), loaded_layout(wide * sin).to(m.dtype)


@triton.jit
def store_gradient(
    first, second, x, turns, start, length, TURNED: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr
):
    """Store the gradient of Q' or K', or the gradient of the magnitudes, which is d(m cos) cos + d(m sin) sin."""
    if KIND.frequencies == 0:
        store_tile(first, x, start, length, KIND.width)
    else:
        cos, sin = load_turns(turns, start, length, TURNED, ROWS, KIND)
        store_tile(first * cos + second * sin, x, start, length, KIND.width)


@triton.jit
def load_two(
    near,
    far,
    turns,
    start,
    length,
    TURNED: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """Load the (near, far) tiles at row `start`. If a segment is unused, both tiles are those of the other one. For
    magnitudes, which have one segment, the tiles are the halves of Q' or K'.
    """
    if KIND.frequencies > 0:
        near_tile, far_tile = load_halves(near, turns, start, length, TURNED, ROWS, KIND)
    else:
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
    """Return a float32 tile of zeros, [ROWS, COLUMNS]."""
    # A separate function, because Triton 3.6 accepts compile-time arguments as a shape, but not their fields.
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def constant_rows(value, ROWS: tl.constexpr):
    """Return a float32 vector [ROWS] filled with `value`."""
    return tl.full([ROWS], value, tl.float32)


@triton.jit
def dot(a, b):
    """Return the matrix product a b in float32; float32 operands are not rounded to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_halves(a, b):
    """Return the matrix product of tiles that are given as two halves of their columns, a b^T, in float32."""
    return tl.dot(a[1], tl.trans(b[1]), dot(a[0], tl.trans(b[0])), input_precision="ieee")


@triton.jit
def block_and_head(length, heads, ROWS: tl.constexpr):
    """Return (row block, number of row blocks, batch and head as one number, batch, head) of this program.

    All indices share one dimension of the grid, because only the first dimension may exceed 65,535.
    """
    blocks = tl.cdiv(length, ROWS)
    place = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks, blocks, place, place // heads, place % heads


@triton.jit
def load_coefficients(coefficients, head, scale, KIND: tl.constexpr):
    """Return (c0 / scale, c1) of a head from the float32 table [heads, 2]; zeros without a formula."""
    c0 = 0.0
    c1 = 0.0
    if KIND.formula != "none":
        c0 = tl.load(coefficients + 2 * head) / scale
        c1 = tl.load(coefficients + 2 * head + 1)
    return c0, c1


@triton.jit
def distances(m, n):
    """Return m - n in float32, exact below 2^24. Token indices are converted to float32 first, instead of each pair."""
    return m.to(tl.float32) - n.to(tl.float32)


@triton.jit
def power_of_distance(distance, exponent):
    """Return distance^exponent; 0 for distance <= 0, which has no logarithm."""
    return tl.where(distance > 0, tl.exp2(exponent * tl.log2(tl.maximum(distance, 1.0))), 0.0)


@triton.jit
def add_bias(products, m, n, bias, KIND: tl.constexpr):
    """Add the bias at distances m - n to the products. The bias is divided by the scale, as c0 already is."""
    if KIND.formula == "linear":
        products = products - bias[0] * distances(m, n)
    if KIND.formula == "log":
        logs = tl.log2(1.0 + bias[1] * tl.maximum(distances(m, n), 0.0))
        products = products - (bias[0] * 0.6931471805599453) * logs
    if KIND.formula == "power":
        products = products - bias[0] * power_of_distance(distances(m, n), bias[1])
    return products


@triton.jit
def bias_derivatives(m, n, c1, KIND: tl.constexpr):
    """Return d bias / d c0 and (d bias / d c1) / c0 at distances m - n, for the unscaled bias. If the formula has no
    c1, the second result is 0.
    """
    distance = tl.maximum(distances(m, n), 0.0)
    first = -distance
    second = tl.zeros_like(distance)
    if KIND.formula == "log":
        first = -0.6931471805599453 * tl.log2(1.0 + c1 * distance)
        second = -distance / (1.0 + c1 * distance)
    if KIND.formula == "power":
        first = -power_of_distance(distance, c1)
        second = first * 0.6931471805599453 * tl.log2(tl.maximum(distance, 1.0))
    return first, second


@triton.jit
def logits(
    held,
    loaded,
    m,
    n,
    start,
    limits,
    bias,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Return the scores of a tile divided by the scale, with -inf for masked pairs. `held` and `loaded` are (near, far)
    tiles, `m` and `n` are the token indices of the queries and keys, and `start` is the first token of each query's
    document. A tile needs one matrix product, or two if the boundary between near and far distances runs
    through it.

    The scale is applied in the exponent, exp2(score * scale - peak * scale), at the cost of one more instruction.
    """
    r = m - n
    if KIND.frequencies > 0:
        products = dot_halves(held, loaded)
    elif NEAR and FAR:
        products = tl.where(r < limits[0], dot(held[0], tl.trans(loaded[0])), dot(held[1], tl.trans(loaded[1])))
    elif NEAR:
        products = dot(held[0], tl.trans(loaded[0]))
    else:
        products = dot(held[1], tl.trans(loaded[1]))
    scores = add_bias(products, m, n, bias, KIND)
    if MASKED:
        scores = tl.where(visible(r, n, start, limits, NEAR, FAR, KIND), scores, float("-inf"))
    return scores


@triton.jit
def visible(r, n, start, limits, NEAR: tl.constexpr, FAR: tl.constexpr, KIND: tl.constexpr):
    """Return the mask of the visible pairs of a tile: the key is not after the query (r >= 0), the distance is in the
    tile's segment (below the window, or from the window on), and both tokens are in the same document. A far segment
    may be limited to the first keys of a document.
    """
    seen = r >= 0
    if KIND.window and not FAR:
        seen = seen & (r < limits[0])
    if not NEAR:
        seen = seen & (r >= limits[0])
    if FAR and KIND.first:
        among_first = n < start + limits[1]
        if NEAR:
            seen = seen & (among_first | (r < limits[0]))
        else:
            seen = seen & among_first
    if KIND.documents:
        seen = seen & (n >= start)
    return seen


@triton.jit
def part(slopes, r, limits, NEAR: tl.constexpr, FAR: tl.constexpr):
    """Return the (near, far) parts of a tile's score gradients. If a tile has pairs of only one segment, both parts are
    the whole tile.
    """
    if NEAR and FAR:
        return tl.where(r < limits[0], slopes, 0.0), tl.where(r < limits[0], 0.0, slopes)
    else:
        return slopes, slopes


@triton.jit
def start_of_document(starts, batch, token, key_length, KIND: tl.constexpr):
    """Return the index of the first token in the document of `token` (a scalar or a vector); 0 without documents."""
    if KIND.documents:
        token = tl.minimum(token, key_length - 1)
        return tl.load(starts + tl.cast(batch, tl.int64) * key_length + token).to(tl.int32)
    else:
        return token * 0


@triton.jit
def key_phases(first_query, starts, batch, key_length, limits, KIND: tl.constexpr):
    """Return the boundaries of the phases of a query block, in key tiles.

    From [0] to [1], all pairs are far; from [2] to [3], the window's edge crosses the tile; from [3] to [4], all pairs
    are near and visible; from [4] to [5], the diagonal crosses the tile, and the window's edge may too. Without a
    window, the first two phases are empty. Tiles of earlier documents and far tiles after the first keys are skipped.
    """
    last_query = tl.minimum(first_query + KIND.rows, key_length) - 1
    begin = start_of_document(starts, batch, first_query, key_length, KIND) // KIND.keys
    edge = begin
    full = begin
    if KIND.window:
        edge = tl.maximum(begin, tl.maximum(first_query - limits[0] + 1, 0) // KIND.keys)
        full = tl.maximum(edge, tl.cdiv(tl.maximum(last_query - limits[0] + 1, 0), KIND.keys))
    far_end = edge
    if KIND.first:
        last_start = start_of_document(starts, batch, last_query, key_length, KIND)
        far_end = tl.minimum(edge, tl.cdiv(last_start + limits[1], KIND.keys))
    diagonal = tl.maximum(full, (first_query + 1) // KIND.keys)
    return begin, far_end, edge, full, diagonal, last_query // KIND.keys + 1


@triton.jit
def query_phases(first_key, starts, stops, batch, query_length, key_length, limits, KIND: tl.constexpr):
    """Return the boundaries of the phases of a key block, in query tiles.

    From [0] to [1], the diagonal crosses the tile and all pairs are near; from [2] to [3], all pairs are near and
    visible; from [3] to [4], the window's edge crosses the tile; from [4] to [5], all pairs are far. Queries of later
    documents are skipped. Far queries are skipped if the block contains none of the first keys.
    """
    last_key = tl.minimum(first_key + KIND.keys, key_length) - 1
    past = key_length - query_length
    end = tl.cdiv(query_length, KIND.rows)
    if KIND.documents:
        stop = tl.load(stops + tl.cast(batch, tl.int64) * key_length + last_key).to(tl.int32)
        end = tl.minimum(end, tl.cdiv(tl.maximum(stop - past, 0), KIND.rows))
    begin = tl.maximum(first_key - past, 0) // KIND.rows
    edge = end
    far = end
    if KIND.window:
        edge = tl.minimum(end, tl.maximum(limits[0] + first_key - past, 0) // KIND.rows)
        far = tl.minimum(end, tl.cdiv(tl.maximum(limits[0] + last_key - past, 0), KIND.rows))
    far_end = end
    if KIND.first:
        # The block's first key is the nearest to the start of its document, unless another document starts within the
        # block.
        first_start = start_of_document(starts, batch, first_key, key_length, KIND)
        last_start = start_of_document(starts, batch, last_key, key_length, KIND)
        far_end = tl.where((first_key < first_start + limits[1]) | (last_start > first_start), end, far)
    full = tl.minimum(tl.cdiv(tl.maximum(last_key - past, 0), KIND.rows), edge)
    return begin, full, tl.maximum(begin, full), tl.maximum(begin, edge), far, far_end
