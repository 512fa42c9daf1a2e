"""Several segments by plain flash calls, merged by log-sum-exp: ReRoPE and its kin in O(N) memory, N^2 / 2 pairs.

The visible pairs are cut into pieces that need no mask (pieces.py). Each piece gives an output and a log-sum-exp for
its rows; the outputs of a row, weighted by their shares of the row's total, add up to attention over all its keys. The
backward pass of a piece is the flash kernel's own, with the merged output and log-sum-exp in place of the piece's:
then its softmax weights and its row sums are those of the whole row, and its gradients are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.backends.sdpa import FlashOp, flash_op
from megatron_coca.attention.inputs import AttentionInputs, Band, Needs, attend_by_document

Shape = Literal["full", "lower", "upper"]


@dataclass(frozen=True)
class Piece:
    """Pairs of consecutive queries and keys, `blocks` times over, each block `step` queries and keys after the last.

    Row i and column j of a block, counted from its first query and key, are visible: all of them (full), where j <= i
    (lower, a causal square), or where j >= i (upper, a causal square once both its sides are reversed).

    Attributes:
        query: index among the query rows of the first block's first query.
        key: index of the first block's first key.
        rows: queries in a block.
        columns: keys in a block; as many as rows in a triangle.
    """

    query: int
    key: int
    rows: int
    columns: int
    shape: Shape = "full"
    blocks: int = 1
    step: int = 0


@lru_cache(maxsize=256)
def cover(band: Band, past: int, length: int) -> tuple[Piece, ...]:
    """The pieces of `band` for queries `past` to `length` of `length` keys: every visible pair once, no other pair.

    A query at token m and the band [low, high) see the keys n = m - low, m - low - 1, ... Counted from row = m - low,
    these are the keys row - width < n <= row that are neither negative nor beyond the first keys. So going down the
    rows, the keys first grow by one a row, then slide (or stay, where the first keys are used up before the width),
    and then shrink.
    """
    stop = length - band.low
    start = max(past - band.low, 0)
    width = stop if band.high is None else min(band.high - band.low, stop)
    first = stop if band.first_keys is None else min(band.first_keys, stop)
    inner, outer = sorted((width, first))
    pieces = [*_growing(start, min(inner, stop))]
    if width < first:
        pieces += _sliding(max(start, width), first, width)
    else:
        pieces += _rectangle(max(start, first), min(width, stop), 0, first)
    below = max(start, outer)
    pieces += _shrinking(below, stop, below - width + 1, first)
    offset = band.low - past
    return tuple(_fold(replace(piece, query=piece.query + offset) for piece in pieces))


def _rectangle(top: int, bottom: int, left: int, right: int) -> Iterator[Piece]:
    if top < bottom and left < right:
        yield Piece(top, left, bottom - top, right - left)


def _triangle(top: int, left: int, size: int, shape: Shape) -> Iterator[Piece]:
    if size > 0:
        yield Piece(top, left, size, size, shape if size > 1 else "full")


def _growing(top: int, bottom: int) -> Iterator[Piece]:
    """Row m sees the keys 0 to m."""
    if bottom == top + 1:
        yield from _rectangle(top, bottom, 0, bottom)
    elif bottom > top:
        yield from _triangle(top, top, bottom - top, "lower")
        yield from _rectangle(top, bottom, 0, top)


def _sliding(top: int, bottom: int, width: int) -> Iterator[Piece]:
    """Row m >= width sees the `width` keys up to m: blocks of `width` rows, each with the keys beside and before it."""
    for row in range(top, bottom, width):
        end = min(row + width, bottom)
        if end == row + 1:
            yield from _rectangle(row, end, row - width + 1, end)
        else:
            yield from _triangle(row, row, end - row, "lower")
            yield from _shrinking(row, end, row - width + 1, row)


def _shrinking(top: int, bottom: int, left: int, right: int) -> Iterator[Piece]:
    """Row top + i sees the keys left + i to right - 1."""
    size = min(bottom - top, right - left)
    yield from _triangle(top, left, size, "upper")
    yield from _rectangle(top, top + size, left + size, right)


def _fold(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Equal pieces at equal steps along the diagonal as one."""
    groups: dict[tuple[int, int, int, Shape], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.query - piece.key, piece.rows, piece.columns, piece.shape), []).append(piece)
    for group in groups.values():
        yield from _runs(group)


def _runs(pieces: list[Piece]) -> Iterator[Piece]:
    run = pieces[0]
    for piece in pieces[1:]:
        distance = piece.query - run.query
        if distance == run.blocks * (run.step or distance):
            run = replace(run, blocks=run.blocks + 1, step=run.step or distance)
        else:
            yield run
            run = piece
    yield run


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
            ValueError: there is a bias or dropout.
        """
        if inputs.bias is not None or inputs.dropout > 0:
            raise ValueError("attention_backend merge has neither bias nor dropout; build the model to be trained so")
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

    def meet_queries(self, rows: "_Rows", unmet: float) -> bool:
        """Note in `rows` that the queries of the piece meet it; whether it is the first for all of them."""
        return rows.meet(self.piece.query, self.piece.rows, self.piece.blocks, self.piece.step, unmet)

    def add_queries(self, sums: "_Rows", found: Tensor) -> None:
        """Add what the kernel found for the rows of the piece, [batch * blocks, heads, rows, ...]."""
        place, found = self.place_of_queries(sums.tensor), self.restore(found)
        place.copy_(found) if self.meet_queries(sums, 0.0) else place.add_(found)

    def add_keys(self, sums: "_Rows", found: Tensor) -> None:
        """The same for the key rows."""
        piece = self.piece
        place, found = self.place_of_keys(sums.tensor), self.restore(found)
        first = sums.meet(piece.key, piece.columns, piece.blocks, piece.step)
        place.copy_(found) if first else place.add_(found)

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


class _Rows:
    """A tensor [batch, heads, length, ...] that pieces are added to, and which of its rows have met a piece.

    Starting from empty memory, the first piece of a row is written and not added: for ReRoPE that saves clearing and
    reading back most of the sums.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._met = bytearray(tensor.shape[2])

    def meet(self, start: int, size: int, blocks: int, step: int, unmet: float = 0.0) -> bool:
        """Note that these rows meet a piece; whether it is the first for all of them. Where it is for some only, those
        are filled with `unmet`.
        """
        spans = [(start + block * step, start + block * step + size) for block in range(blocks)]
        first = not any(any(self._met[low:high]) for low, high in spans)
        for low, high in spans:
            if not first:
                self._fill(low, high, unmet)
            self._met[low:high] = bytes([1]) * (high - low)
        return first

    def finished(self) -> Tensor:
        """The tensor, rows that met no piece cleared."""
        self._fill(0, len(self._met), 0.0)
        return self.tensor

    def _fill(self, low: int, high: int, value: float) -> None:
        while (low := self._met.find(0, low, high)) >= 0:
            end = self._met.find(1, low, high)
            end = high if end < 0 else end
            self.tensor[:, :, low:end] = value
            low = end


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
        merged = out.tensor.to(value.dtype)
        ctx.save_for_backward(value, merged, lse.tensor, *operands)
        ctx.scale, ctx.parts = scale, parts
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, out, lse, *operands = ctx.saved_tensors
        sums = [_Rows(torch.empty_like(x, dtype=lse.dtype)) for x in (value, *operands)]
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        op = flash_op(value)
        for part in ctx.parts:
            q, k = operands[2 * part.segment : 2 * part.segment + 2]
            dq, dk, dv = _backward(op, part, (grad, q, k, value, out, lse), ctx.scale)
            part.add_queries(sums[1 + 2 * part.segment], dq)
            part.add_keys(sums[2 + 2 * part.segment], dk)
            part.add_keys(sums[0], dv)
        return None, None, *(x.finished().to(value.dtype) for x in sums)


def _empty_rows(query: Tensor) -> tuple[_Rows, _Rows]:
    """The output and the log-sum-exp of rows that have met no key yet, float32 or better."""
    batch, heads, length, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty(batch, length, heads, head_dim, dtype=dtype, device=query.device).transpose(1, 2)
    return _Rows(out), _Rows(torch.empty(batch, heads, length, dtype=dtype, device=query.device))


def _merge(part: _Part, out: _Rows, lse: _Rows, part_out: Tensor, part_lse: Tensor) -> None:
    """Take a piece into the rows' output and log-sum-exp, in place.

    The share of the piece in the row is exp(part_lse) / (exp(lse) + exp(part_lse)), a sigmoid: 1 where the row has met
    no key, never NaN, because a row of a piece always has a key.
    """
    rows, totals = part.place_of_queries(out.tensor), part.place_of_queries(lse.tensor)
    part_out, part_lse = part.restore(part_out), part.restore(part_lse)
    first = part.meet_queries(out, 0.0) & part.meet_queries(lse, -torch.inf)
    if first:
        rows.copy_(part_out)
        totals.copy_(part_lse)
    else:
        rows.lerp_(part_out.to(rows.dtype), torch.sigmoid(part_lse - totals)[..., None])
        totals.copy_(torch.logaddexp(totals, part_lse))


def _backward(op: FlashOp, part: _Part, tensors: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, value, out, lse = tensors
    cut = part.queries
    return op.backward(cut(grad), cut(q), part.keys(k), part.keys(value), cut(out), cut(lse), part.causal, scale)
