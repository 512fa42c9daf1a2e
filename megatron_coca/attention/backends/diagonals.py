"""Causal flash attention on the CPU with a bias of the distance, in memory linear in the length.

A bias b(r) of the distance r = m - n is constant along diagonals, so it has one value for each of them. With the rows
of a block of queries reversed, entry (row, column) of the mask lies at offset + row + column of one vector per head:
the mask of every block is a view of that vector with strides (1, 1), exact in float32. Distances below zero hold -inf,
so the same vector is the causal mask.

PyTorch's flash kernel gives no gradient to a mask, and its fallback builds all N x N scores. A learned bias needs the
sum of the scores' gradients along each diagonal; they are formed tile by tile and added up in a skewed buffer, whose
columns are the diagonals.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.inputs import DistanceBias

aten = torch.ops.aten
QUERY_BLOCK = 512
"""Query rows per call: longer blocks spend more on hidden keys, shorter ones more on calls (docs/attention.md)."""
KEY_BLOCK = 1024
"""Key columns of a tile of score gradients: with QUERY_BLOCK rows it is 2 MiB, which a core's cache holds."""


def biased_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: DistanceBias) -> Tensor:
    """softmax(scale * Q' K'^T + b(r)) V, causal, [batch, heads, query_length, head_dim] in the query's dtype.

    The operands are those of `AttentionInputs`, on the CPU. Gradients flow to them and to the bias's coefficients.
    """
    rows = min(QUERY_BLOCK, query.shape[2])
    return _Biased.apply(query, key, value, diagonals(bias, key.shape[2], rows, query), scale)  # type: ignore[no-untyped-call]


def diagonals(bias: DistanceBias, key_length: int, rows: int, query: Tensor) -> Tensor:
    """The bias at distances key_length - 1, ..., 0 and then `rows - 1` times -inf (keys to come), [heads, ...]."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    distance = torch.arange(key_length - 1, -rows, -1)
    return bias.at(distance.clamp(min=0).to(dtype)).masked_fill(distance < 0, -math.inf)


def reversed_mask(along: Tensor, rows: int, columns: int, key_length: int) -> Tensor:
    """The mask [1, heads, rows, columns] of a block whose last row sees `columns` keys, rows reversed."""
    heads, length = along.shape
    return along.as_strided((1, heads, rows, columns), (0, length, 1, 1), storage_offset=key_length - columns)


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, along: Tensor, scale: float) -> Tensor:
        along = along.contiguous()
        out, lse = torch.empty_like(query), torch.empty(query.shape[:3], dtype=along.dtype)
        for start, stop, visible in _blocks(query.shape[2], key.shape[2]):
            mask = reversed_mask(along, stop - start, visible, key.shape[2])
            block, keys, values = query[:, :, start:stop].flip(2), key[:, :, :visible], value[:, :, :visible]
            part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
                block, keys, values, 0.0, False, attn_mask=mask, scale=scale
            )
            out[:, :, start:stop], lse[:, :, start:stop] = part.flip(2), part_lse.flip(2)
        ctx.save_for_backward(query, key, value, along, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, along, out, lse = ctx.saved_tensors
        wide = torch.promote_types(query.dtype, torch.float32)
        query_grad = torch.empty_like(query)
        key_grad, value_grad = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        along_grad = torch.zeros_like(along) if ctx.needs_input_grad[3] else None
        for start, stop, visible in _blocks(query.shape[2], key.shape[2]):
            mask = reversed_mask(along, stop - start, visible, key.shape[2])
            rows = [x[:, :, start:stop].flip(2) for x in (grad, query, out, lse)]
            keys, values = key[:, :, :visible], value[:, :, :visible]
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                rows[0], rows[1], keys, values, *rows[2:], 0.0, False, attn_mask=mask, scale=ctx.scale
            )
            query_grad[:, :, start:stop] = dq.flip(2)
            key_grad[:, :, :visible] += dk
            value_grad[:, :, :visible] += dv
            if along_grad is not None:
                _add_along_diagonals(along_grad[:, key.shape[2] - visible :], rows, keys, values, mask, ctx.scale)
        return query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), along_grad, None


def _blocks(query_length: int, key_length: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, keys that the last row sees) of every block of queries."""
    stops = [min(start + QUERY_BLOCK, query_length) for start in range(0, query_length, QUERY_BLOCK)]
    starts = range(0, query_length, QUERY_BLOCK)
    return [(start, stop, key_length - query_length + stop) for start, stop in zip(starts, stops, strict=True)]


def _add_along_diagonals(
    along_grad: Tensor, rows: list[Tensor], keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> None:
    """Add the gradient of the scores of a block to `along_grad` [heads, ...] at row + column, head by head."""
    wide = along_grad.dtype
    grad, query, out, lse = rows
    shares = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    groups = query.shape[1] // keys.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            sides = [x[batch, head].to(wide) for x in (query, grad, shares, lse[..., None])]
            for first in range(0, keys.shape[2], KEY_BLOCK):
                columns = slice(first, min(first + KEY_BLOCK, keys.shape[2]))
                tile = [x[batch, head // groups, columns].to(wide) for x in (keys, values)]
                sums = _tile_sums(sides, tile, mask[0, head, :, columns], scale)
                along_grad[head, first : first + len(sums)] += sums


def _tile_sums(sides: list[Tensor], tile: list[Tensor], mask: Tensor, scale: float) -> Tensor:
    """sum over row + column = c of weight * (d weight - share) of one tile, for every c, [rows + columns - 1].

    The buffer's rows are one longer than the tile's columns and rows together, so that entry (row, column) falls into
    column row + column of the row before: written straight, read skewed.
    """
    query, grad, shares, lse = sides
    keys, values = tile
    rows, columns = len(query), len(keys)
    weights = torch.baddbmm(mask[None], query[None], keys.T[None], alpha=scale)[0].sub_(lse).exp_()
    skewed = weights.new_zeros(rows, rows + columns)
    straight = skewed.as_strided((rows, columns), (rows + columns + 1, 1))
    torch.mul(torch.addmm(-shares, grad, values.T), weights, out=straight)
    return skewed.sum(0)[:-1]
