"""Several segments by plain flash calls, merged by log-sum-exp: ReRoPE and its kin in O(N) memory, N^2 / 2 pairs.

The visible pairs are cut into pieces that need no mask (pieces.py). Each piece gives an output and a log-sum-exp for
its rows; the outputs of a row, weighted by their shares of the row's total, add up to attention over all its keys. The
backward pass of a piece is the flash kernel's own, with the merged output and log-sum-exp in place of the piece's:
then its softmax weights and its row sums are those of the whole row, and its gradients are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.backends.documents import attend_by_document
from megatron_coca.attention.backends.flash_ops import FlashOp, flash_op
from megatron_coca.attention.backends.pieces import Piece, cover
from megatron_coca.attention.inputs import AttentionInputs, Band, Needs

MAX_CUDA_HEAD_DIM = 256


class MergeBackend:
    """Any number of segments with any bands."""

    def supports(self, needs: Needs) -> str | None:
        """None, or why such a model cannot be served."""
        if needs.device_type not in ("cpu", "cuda"):
            return f"it calls PyTorch's flash kernels for CPU and CUDA, not {needs.device_type}"
        if needs.bias:
            return "its calls take no mask, so no bias"
        if needs.dropout > 0:
            return "its calls share no random state, so a weight could not be dropped alike forward and backward"
        if needs.device_type == "cuda" and (needs.head_dim % 8 or needs.head_dim > MAX_CUDA_HEAD_DIM):
            return f"its CUDA kernels need a head_dim that is a multiple of 8 and at most {MAX_CUDA_HEAD_DIM}"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """[batch, heads, query_length, head_dim] in the query's dtype.

        Raises:
            TypeError: there is no kernel for the operands' dtype and device.
        """
        return attend_by_document(_attend_row, inputs)


def _attend_row(inputs: AttentionInputs) -> Tensor:
    operands = [x for segment in inputs.segments for x in (segment.query, segment.key)]
    bands = tuple(segment.band for segment in inputs.segments)
    return _Merged.apply(inputs.scale, bands, inputs.value, *operands)


@dataclass(frozen=True)
class _Part:
    """A piece of a segment: how to cut it out of tensors [batch, heads, length, ...] and to find its place in them."""

    segment: int
    piece: Piece

    @property
    def causal(self) -> bool:
        return self.piece.shape != "full"

    def queries(self, x: Tensor) -> Tensor:
        """The rows of `x` in the piece, in the order of the kernel, [batch * blocks, heads, rows, ...]."""
        return self._cut(x, self.piece.query, self.piece.rows)

    def keys(self, x: Tensor) -> Tensor:
        """The same of the key rows."""
        return self._cut(x, self.piece.key, self.piece.columns)

    def place_of_queries(self, x: Tensor) -> Tensor:
        """The view of `x` that the rows of the piece belong in, [batch, blocks, heads, rows, ...]."""
        return self._place(x, self.piece.query, self.piece.rows)

    def place_of_keys(self, x: Tensor) -> Tensor:
        """The same of the key rows."""
        return self._place(x, self.piece.key, self.piece.columns)

    def restore(self, x: Tensor) -> Tensor:
        """A result of the kernel [batch * blocks, heads, rows, ...] in the shape and order of its place."""
        x = x.flip(2) if self.piece.shape == "upper" else x
        return x.unflatten(0, (-1, self.piece.blocks))

    def _cut(self, x: Tensor, start: int, size: int) -> Tensor:
        x = self._place(x, start, size).flatten(0, 1)
        return x.flip(2) if self.piece.shape == "upper" else x

    def _place(self, x: Tensor, start: int, size: int) -> Tensor:
        strides = (x.stride(0), self.piece.step * x.stride(2), x.stride(1), *x.stride()[2:])
        shape = (x.shape[0], self.piece.blocks, x.shape[1], size, *x.shape[3:])
        return x.as_strided(shape, strides, x.storage_offset() + start * x.stride(2))


def _parts(bands: tuple[Band, ...], query_length: int, key_length: int) -> Iterator[_Part]:
    for index, band in enumerate(bands):
        for piece in cover(band, key_length - query_length, key_length):
            yield _Part(index, piece)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, bands: tuple[Band, ...], value: Tensor, *operands: Tensor) -> Tensor:
        op = flash_op(value)
        parts = list(_parts(bands, operands[0].shape[2], value.shape[2]))
        out, lse = _empty_rows(operands[0])
        for part in parts:
            q, k = operands[2 * part.segment : 2 * part.segment + 2]
            found = op.forward(part.queries(q), part.keys(k), part.keys(value), part.causal, scale)
            _merge(part, out, lse, *found)
        out = out.to(value.dtype)
        ctx.save_for_backward(value, out, lse, *operands)
        ctx.scale, ctx.parts = scale, parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, out, lse, *operands = ctx.saved_tensors
        sums = [torch.zeros_like(x, dtype=lse.dtype) for x in (value, *operands)]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        op = flash_op(value)
        for part in ctx.parts:
            q, k = operands[2 * part.segment : 2 * part.segment + 2]
            dq, dk, dv = _backward(op, part, (grad, q, k, value, out, lse), ctx.scale)
            part.place_of_queries(sums[1 + 2 * part.segment]).add_(part.restore(dq))
            part.place_of_keys(sums[2 + 2 * part.segment]).add_(part.restore(dk))
            part.place_of_keys(sums[0]).add_(part.restore(dv))
        return None, None, *(x.to(value.dtype) for x in sums)


def _empty_rows(query: Tensor) -> tuple[Tensor, Tensor]:
    """An output of zeros and a log-sum-exp of -inf: rows that have met no key yet. Float32 or better."""
    batch, heads, length, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(batch, length, heads, head_dim, dtype=dtype, device=query.device).transpose(1, 2)
    return out, torch.full((batch, heads, length), -torch.inf, dtype=dtype, device=query.device)


def _merge(part: _Part, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Take a piece into the rows' output and log-sum-exp, in place.

    The share of the piece in the row is exp(part_lse) / (exp(lse) + exp(part_lse)), a sigmoid: 1 where the row has met
    no key, never NaN, because a row of a piece always has a key.
    """
    rows, totals = part.place_of_queries(out), part.place_of_queries(lse)
    part_out, part_lse = part.restore(part_out).to(out.dtype), part.restore(part_lse)
    rows.lerp_(part_out, torch.sigmoid(part_lse - totals)[..., None])
    totals.copy_(torch.logaddexp(totals, part_lse))


def _backward(op: FlashOp, part: _Part, tensors: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, value, out, lse = tensors
    cut = part.queries
    return op.backward(cut(grad), cut(q), part.keys(k), part.keys(value), cut(out), cut(lse), part.causal, scale)
