"""Attention with a distance bias on the CPU, in linear memory: PyTorch's flash kernel with a strided view as its mask.

The bias b(r) depends only on the distance r = m - n between query m and key n, so the mask of all pairs is constant
along each diagonal. If the rows of a query block are reversed, mask entry (row, column) is element row + column of one
vector: b at decreasing distances, then -inf for later keys. The mask is a view of this vector with strides (1, 1), so
its rows x columns numbers are never stored:

    queries 3 to 5, keys 0 to 5               along = b5 b4 b3 b2 b1 b0 -- --       (--: -inf)

                 key   0   1   2   3   4   5
    query 5 (row 0)   b5  b4  b3  b2  b1  b0    along[0:6]
    query 4 (row 1)   b4  b3  b2  b1  b0  --    along[1:7]
    query 3 (row 2)   b3  b2  b1  b0  --  --    along[2:8]

The gradient of b(r) is the sum of the score gradients on one diagonal. Score gradients are computed tile by tile. A
tile is written through a view of a wider buffer. Each row of the view starts one column further to the right, so each
diagonal of the tile is a column of the buffer.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_coca.attention.inputs import DistanceBias
from megatron_coca.kernels.custom_op import operation

aten = torch.ops.aten
QUERY_BLOCK = 512
"""Query rows per kernel call. Larger blocks compute more masked pairs; smaller blocks need more calls."""
TILE_ROWS, KEY_BLOCK = 256, 1024
"""Query rows and key columns of a tile of score gradients. A tile takes 1 MiB, which fits in a core's cache. With fewer
rows per tile, more masked keys are skipped.
"""


def biased_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: DistanceBias | None, window: int | None = None
) -> Tensor:
    """Compute causal softmax(scale * Q' K'^T + b(r)) V, [batch, heads, query_length, head_dim] in the query's dtype.
    With a window, only pairs with r < window are visible. Without a bias, b is 0.

    The operands are those of `AttentionInputs`, on the CPU. Gradients flow to the operands and to the bias
    coefficients. Most terms of a coefficient's gradient, which is a sum over all pairs, cancel. With a learned bias,
    half-precision operands are therefore converted to float32.
    """
    rows, dtype = min(QUERY_BLOCK, query.shape[2]), query.dtype
    along = diagonals(bias, key.shape[2], rows, query, window).contiguous()
    if along.requires_grad:
        query, key, value = (x.to(along.dtype) for x in (query, key, value))
    return _operation(query, key, value, along, scale)[0].to(dtype)


def diagonals(
    bias: DistanceBias | None, key_length: int, rows: int, query: Tensor, window: int | None = None
) -> Tensor:
    """Return the bias at distances key_length - 1, ..., 0, followed by `rows - 1` entries of -inf for later keys,
    [heads, ...]. Entries at distances >= `window` are -inf too.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    distance = torch.arange(key_length - 1, -rows, -1)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    if bias is None:
        return torch.zeros(query.shape[1], len(distance), dtype=dtype).masked_fill(hidden, -math.inf)
    return bias.at(distance.clamp(min=0).to(dtype)).masked_fill(hidden, -math.inf)


def reversed_mask(along: Tensor, rows: int, columns: int, key_length: int) -> Tensor:
    """Return the mask [1, heads, rows, columns] of a query block with its rows reversed. The block's last query sees
    `columns` keys.
    """
    heads, length = along.shape
    return along.as_strided((1, heads, rows, columns), (0, length, 1, 1), storage_offset=key_length - columns)


class _Rows(NamedTuple):
    """Saved tensors of a query block with its rows reversed, [batch, heads, rows, ...]."""

    grad: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


class _Tile(NamedTuple):
    """The attention weights and the score gradients of a tile, [rows, columns] each. `scores` is a view of `skewed`
    [rows, rows + columns].
    """

    weights: Tensor
    scores: Tensor
    skewed: Tensor


def attend_biased(query: Tensor, key: Tensor, value: Tensor, along: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp [batch, heads, query_length]; `along` is the result of `diagonals`."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[:3], dtype=along.dtype)
    for start, stop, visible in _blocks(query.shape[2], key.shape[2]):
        mask = reversed_mask(along, stop - start, visible, key.shape[2])
        block, keys, values = query[:, :, start:stop].flip(2), key[:, :, :visible], value[:, :, :visible]
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            block, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        out[:, :, start:stop], lse[:, :, start:stop] = part.flip(2), part_lse.flip(2)
    return out, lse


def biased_gradients(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    along: Tensor,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and `along`. The last is zero unless the bias is `learned`."""
    wide = torch.promote_types(query.dtype, torch.float32)
    query_grad = torch.empty_like(query)
    key_grad, value_grad = (torch.zeros(x.shape, dtype=wide) for x in (key, value))
    along_grad = torch.zeros_like(along)
    for start, stop, visible in _blocks(query.shape[2], key.shape[2]):
        rows = _Rows(*(x[:, :, start:stop].flip(2) for x in (grad, query, out, lse)))
        keys, values = key[:, :, :visible], value[:, :, :visible]
        mask = reversed_mask(along, stop - start, visible, key.shape[2])
        sums = key_grad[:, :, :visible], value_grad[:, :, :visible]
        if learned:
            diagonal_sums = along_grad[:, key.shape[2] - visible :]
            dq = _tiled_backward(rows, keys, values, mask, scale, sums, diagonal_sums)
        else:
            dq = _flash_backward(rows, keys, values, mask, scale, sums)
        query_grad[:, :, start:stop] = dq.flip(2)
    return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), along_grad


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _fake(query: Tensor, key: Tensor, value: Tensor, along: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty(query.shape[:3], dtype=along.dtype)


def _fake_gradients(grad: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    query, key, value, along = rest[:4]
    return torch.empty_like(query), key.new_empty(key.shape), value.new_empty(value.shape), torch.empty_like(along)


def _backward(ctx: Any, grad: Tensor, lse_grad: None) -> tuple[Any, ...]:
    learned = ctx.needs_input_grad[3]
    *grads, along_grad = _gradient_operation(grad, *ctx.saved_tensors, ctx.scale, learned)
    return *grads, along_grad if learned else None, None


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor along, float scale"
_gradient_operation = operation(
    "biased_gradients",
    f"(Tensor grad, Tensor out, Tensor lse, {_GIVEN}, bool learned) -> (Tensor, Tensor, Tensor, Tensor)",
    biased_gradients,
    _fake_gradients,
)
_operation = operation("attend_biased", f"({_GIVEN}) -> (Tensor, Tensor)", attend_biased, _fake, _keep, _backward)


def _blocks(query_length: int, key_length: int) -> list[tuple[int, int, int]]:
    """Return (first row, row after the last, number of keys that the last row sees) for every query block."""
    stops = [min(start + QUERY_BLOCK, query_length) for start in range(0, query_length, QUERY_BLOCK)]
    starts = range(0, query_length, QUERY_BLOCK)
    return [(start, stop, key_length - query_length + stop) for start, stop in zip(starts, stops, strict=True)]


def _flash_backward(
    rows: _Rows, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the query gradient of a block, and add its key and value gradients to `sums`."""
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        rows.grad, rows.query, keys, values, rows.out, rows.lse, 0.0, False, attn_mask=mask, scale=scale
    )
    sums[0].add_(dk)
    sums[1].add_(dv)
    return dq


def _tiled_backward(
    rows: _Rows,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    sums: tuple[Tensor, Tensor],
    diagonal_sums: Tensor,
) -> Tensor:
    """Compute the same as `_flash_backward`, and also add the gradient of mask entry (row, column) to `diagonal_sums`
    [heads, ...] at index row + column.
    """
    wide = diagonal_sums.dtype
    query_grad = torch.zeros(rows.query.shape, dtype=wide)
    shares = (rows.grad.to(wide) * rows.out.to(wide)).sum(-1, keepdim=True)
    groups = rows.query.shape[1] // keys.shape[1]
    for batch in range(keys.shape[0]):
        for head in range(rows.query.shape[1]):
            query, grad = rows.query[batch, head].to(wide), rows.grad[batch, head].to(wide)
            share, lse = shares[batch, head], rows.lse[batch, head, :, None]
            for part, columns in _tiles(len(query), keys.shape[2]):
                place = (batch, head // groups, columns)
                seen, valued, own, grads = keys[place].to(wide), values[place].to(wide), query[part], grad[part]
                tile = _tile(own, grads, share[part], lse[part], seen, valued, mask[0, head, part, columns], scale)
                query_grad[batch, head, part].addmm_(tile.scores, seen, alpha=scale)
                sums[0][place].addmm_(tile.scores.T, own, alpha=scale)
                sums[1][place].addmm_(tile.weights.T, grads)
                along, first = tile.skewed.sum(0)[:-1], part.start + columns.start
                diagonal_sums[head, first : first + len(along)] += along
    return query_grad.to(rows.query.dtype)


def _tiles(rows: int, visible: int) -> Iterator[tuple[slice, slice]]:
    """Yield (row slice, key slice) of every tile. The rows are reversed: row i sees the first `visible` - i keys."""
    for top in range(0, rows, TILE_ROWS):
        for first in range(0, visible - top, KEY_BLOCK):
            yield slice(top, min(top + TILE_ROWS, rows)), slice(first, min(first + KEY_BLOCK, visible - top))


def _tile(
    query: Tensor, grad: Tensor, shares: Tensor, lse: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> _Tile:
    """Compute the attention weights of a tile and the gradient of its scores, weight * (grad . value - share).

    The gradient is written through a strided view of a wider buffer. Tile entry (row, column) is in buffer column
    row + column, so column sums of the buffer are diagonal sums of the tile.
    """
    rows, columns = len(query), len(keys)
    weights = torch.baddbmm(mask[None], query[None], keys.T[None], alpha=scale)[0].sub_(lse).exp_()
    skewed = weights.new_zeros(rows, rows + columns)
    scores = skewed.as_strided((rows, columns), (rows + columns + 1, 1))
    torch.mul(torch.addmm(-shares, grad, values.T), weights, out=scores)
    return _Tile(weights, scores, skewed)
