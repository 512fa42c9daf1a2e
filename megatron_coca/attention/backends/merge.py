"""Attention over several segments: flash calls without masks, merged by their log-sum-exp. It needs O(N) memory and
computes each pair once.

The visible pairs are divided into pieces that need no mask. A row's output is the sum of its pieces' outputs, each
weighted by its share of the softmax denominator. The backward pass calls the flash kernel's backward for each piece
with the merged output and log-sum-exp, so the softmax weights are those of the complete row and the gradients are
exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_coca.attention.backends.gated import attend_gated
from megatron_coca.attention.backends.sdpa import flash_op, with_key_heads
from megatron_coca.attention.inputs import AttentionInputs, Band, Needs, attend_by_document, attend_padded
from megatron_coca.kernels.custom_op import operation

Shape = Literal["full", "lower", "upper"]


@dataclass(frozen=True)
class BlockPiece:
    """`blocks` equal blocks of `rows` consecutive queries and `columns` consecutive keys, `step` tokens apart.

    `query` and `key` are the indices of the first query row and first key of the first block. `shape` says which pairs
    of a block are visible. `full`: all pairs. `lower`: pairs with column <= row, which is causal. `upper`: pairs with
    column >= row, which is causal if queries and keys are reversed.
    """

    query: int
    key: int
    rows: int
    columns: int
    shape: Shape = "full"
    blocks: int = 1
    step: int = 0


@lru_cache(maxsize=256)
def cover(band: Band, past: int, length: int) -> tuple[BlockPiece, ...]:
    """Return the pieces of `band` for queries `past` to `length` and keys 0 to `length`. They cover every visible pair
    exactly once and no other pair.

    With row = m - low, the query at token m sees the keys row - width < n <= row, limited to the band's first keys.
    From row to row, the range of visible keys first grows by one. Then it slides, or stays if `first_keys` ends before
    `width`. Finally it shrinks.
    """
    if band.chunk is not None:
        return tuple(_fold(_chunks(band, band.chunk, past, length)))
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


def _chunks(band: Band, size: int, past: int, length: int) -> Iterator[BlockPiece]:
    """Yield the pieces for a band of chunks: a query sees earlier chunks and the keys of its own chunk up to itself."""
    for start in range(past // size * size, length, size):
        top, bottom = max(start, past), min(start + size, length)
        left = 0 if band.high is None else max(start - (band.high - 1) * size, 0)
        right = top if band.low == 0 else max(start - (band.low - 1) * size, 0)
        pieces = [*_rectangle(top, bottom, left, right)]
        if band.low == 0:
            pieces += _triangle(top, top, bottom - top, "lower")
        yield from (replace(piece, query=piece.query - past) for piece in pieces)


def _rectangle(top: int, bottom: int, left: int, right: int) -> Iterator[BlockPiece]:
    if top < bottom and left < right:
        yield BlockPiece(top, left, bottom - top, right - left)


def _triangle(top: int, left: int, size: int, shape: Shape) -> Iterator[BlockPiece]:
    if size > 0:
        yield BlockPiece(top, left, size, size, shape if size > 1 else "full")


def _growing(top: int, bottom: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows m that see the keys 0 to m."""
    if bottom == top + 1:
        yield from _rectangle(top, bottom, 0, bottom)
    elif bottom > top:
        yield from _triangle(top, top, bottom - top, "lower")
        yield from _rectangle(top, bottom, 0, top)


def _sliding(top: int, bottom: int, width: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows m >= width that see the `width` keys up to m: two triangles per `width` rows."""
    for row in range(top, bottom, width):
        end = min(row + width, bottom)
        if end == row + 1:
            yield from _rectangle(row, end, row - width + 1, end)
        else:
            yield from _triangle(row, row, end - row, "lower")
            yield from _shrinking(row, end, row - width + 1, row)


def _shrinking(top: int, bottom: int, left: int, right: int) -> Iterator[BlockPiece]:
    """Yield the pieces for rows top + i that see the keys left + i to right - 1."""
    size = min(bottom - top, right - left)
    yield from _triangle(top, left, size, "upper")
    yield from _rectangle(top, top + size, left + size, right)


def _fold(pieces: Iterator[BlockPiece]) -> Iterator[BlockPiece]:
    """Combine equal pieces at equal steps along the diagonal into one piece with several blocks."""
    groups: dict[tuple[int, int, int, Shape], list[BlockPiece]] = {}
    for piece in pieces:
        groups.setdefault((piece.query - piece.key, piece.rows, piece.columns, piece.shape), []).append(piece)
    for run, *rest in groups.values():
        for piece in rest:
            distance = piece.query - run.query
            if distance == run.blocks * (run.step or distance):
                run = replace(run, blocks=run.blocks + 1, step=run.step or distance)
            else:
                yield run
                run = piece
        yield run


MAX_CUDA_HEAD_DIM = 256


class MergeBackend:
    """Merged flash calls for any number of segments with any bands."""

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported."""
        if needs.device_type not in ("cpu", "cuda"):
            return f"PyTorch has flash kernels for CPU and CUDA, but not for {needs.device_type}"
        if needs.bias:
            return "its kernel calls have no mask, and therefore no bias"
        if needs.dropout > 0:
            return "its kernel calls cannot share a dropout mask between the forward and the backward pass"
        if needs.device_type == "cuda" and (needs.head_dim % 8 or needs.head_dim > MAX_CUDA_HEAD_DIM):
            return f"its CUDA kernels need operands with a multiple of 8 features, at most {MAX_CUDA_HEAD_DIM}"
        return None

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Compute attention, [batch, heads, query_length, width of V], in the query's dtype.

        Raises:
            TypeError: no kernel exists for the operands' dtype and device.
            ValueError: the inputs have a bias or dropout.
        """
        if inputs.bias is not None or inputs.dropout > 0:
            raise ValueError(
                "attention_backend: merge supports neither bias nor dropout; build the model with training=True"
            )
        if inputs.gates is not None:
            return attend_gated(self.attend, inputs)
        return attend_padded(partial(attend_by_document, _attend_row), with_key_heads(inputs))


def _attend_row(inputs: AttentionInputs) -> Tensor:
    operands = [x for segment in inputs.segments for x in (segment.query, segment.key)]
    bands = _numbers([segment.band for segment in inputs.segments])
    sinks = [] if inputs.sinks is None else [inputs.sinks]
    return _operation(inputs.scale, bands, inputs.value, operands, sinks)[0]


def _view(x: Tensor, piece: BlockPiece, start: int, size: int) -> Tensor:
    """Return a view [batch, blocks, heads, size, ...] of x [batch, heads, length, ...]: `size` rows per block of the
    piece, with the first block at row `start`.
    """
    strides = (x.stride(0), piece.step * x.stride(2), x.stride(1), *x.stride()[2:])
    shape = (x.shape[0], piece.blocks, x.shape[1], size, *x.shape[3:])
    return x.as_strided(shape, strides, x.storage_offset() + start * x.stride(2))


def _cut(x: Tensor, piece: BlockPiece, start: int, size: int) -> Tensor:
    """Return the rows of `_view` in the kernel's order, [batch * blocks, heads, size, ...]."""
    x = _view(x, piece, start, size)
    return (x.flip(3) if piece.shape == "upper" else x).flatten(0, 1)  # the flip copies; flatten is then often a view


def _queries(x: Tensor, piece: BlockPiece) -> Tensor:
    return _cut(x, piece, piece.query, piece.rows)


def _keys(x: Tensor, piece: BlockPiece) -> Tensor:
    return _cut(x, piece, piece.key, piece.columns)


def _restore(x: Tensor, piece: BlockPiece) -> Tensor:
    """Bring a kernel result [batch * blocks, heads, size, ...] into the shape and order of `_view`."""
    x = x.flip(2) if piece.shape == "upper" else x
    return x.unflatten(0, (-1, piece.blocks))


class _Accumulator:
    """A tensor [batch, heads, length, ...] to which pieces are added, and a record of the rows written so far.

    The tensor is not cleared first: the first piece of a row is copied, not added. For ReRoPE this avoids clearing and
    reading most of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._written = bytearray(tensor.shape[2])

    def first(self, piece: BlockPiece, start: int, size: int, fill: float = 0.0) -> bool:
        """Mark the rows of a piece as written. Return True if none of these rows was written before. Otherwise set the
        rows that were not written before to `fill`, and return False.
        """
        spans = [(start + block * piece.step, start + block * piece.step + size) for block in range(piece.blocks)]
        first = not any(any(self._written[low:high]) for low, high in spans)
        for low, high in spans:
            if not first:
                self._fill(low, high, fill)
            self._written[low:high] = bytes([1]) * (high - low)
        return first

    def add(self, result: Tensor, piece: BlockPiece, start: int, size: int) -> None:
        """Add a kernel result to the rows of a piece."""
        view, result = _view(self.tensor, piece, start, size), _restore(result, piece)
        view.copy_(result) if self.first(piece, start, size) else view.add_(result)

    def finished(self) -> Tensor:
        """Return the tensor, with zeros in the rows that no piece has written."""
        self._fill(0, len(self._written), 0.0)
        return self.tensor

    def _fill(self, low: int, high: int, value: float) -> None:
        while (low := self._written.find(0, low, high)) >= 0:
            end = self._written.find(1, low, high)
            end = high if end < 0 else end
            self.tensor[:, :, low:end] = value
            low = end


def merge(
    scale: float, bands: Sequence[int], value: Tensor, operands: Sequence[Tensor], sinks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output in the query's dtype and the log-sum-exp [batch, heads, query_length] in float32 or better.

    `operands` are the query and key of each segment; `bands` has four numbers per segment, from `_numbers`; `sinks` is
    empty or one tensor [heads], which is included in the log-sum-exp.
    """
    op, query = flash_op(value), operands[0]
    out, lse = (_Accumulator(x) for x in _results(value, query))
    for index, piece in _pieces(bands, query, value):
        q, k = operands[2 * index : 2 * index + 2]
        results = op.forward(_queries(q, piece), _keys(k, piece), _keys(value, piece), piece.shape != "full", scale)
        piece_out, piece_lse = (_restore(x, piece) for x in results)
        rows, totals = (_view(x.tensor, piece, piece.query, piece.rows) for x in (out, lse))
        first = out.first(piece, piece.query, piece.rows)
        lse.first(piece, piece.query, piece.rows, -torch.inf)
        if first:
            rows.copy_(piece_out)
            totals.copy_(piece_lse)
        else:
            # The piece's share is exp(piece_lse) / (exp(lse) + exp(piece_lse)): 1 for a row that has seen no keys yet,
            # and never NaN, because every row of a piece sees a key.
            rows.lerp_(piece_out.to(rows.dtype), torch.sigmoid(piece_lse - totals)[..., None])
            totals.copy_(torch.logaddexp(totals, piece_lse))
    for sink in sinks:  # like one more piece, whose output is 0
        score = sink.to(lse.tensor.dtype)[:, None]
        out.tensor.mul_(torch.sigmoid(lse.tensor - score)[..., None])
        lse.tensor.copy_(torch.logaddexp(lse.tensor, score))
    return out.tensor.to(value.dtype), lse.tensor


def merge_gradients(
    scale: float,
    bands: Sequence[int],
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    value: Tensor,
    operands: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of `value` and of every operand."""
    value_sum, *sums = (_Accumulator(torch.empty_like(x, dtype=lse.dtype)) for x in (value, *operands))
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    op = flash_op(value)
    for index, piece in _pieces(bands, operands[0], value):
        q, k = operands[2 * index : 2 * index + 2]
        dq, dk, dv = op.backward(
            _queries(grad, piece),
            _queries(q, piece),
            _keys(k, piece),
            _keys(value, piece),
            _queries(out, piece),
            _queries(lse, piece),
            piece.shape != "full",
            scale,
        )
        sums[2 * index].add(dq, piece, piece.query, piece.rows)
        sums[2 * index + 1].add(dk, piece, piece.key, piece.columns)
        value_sum.add(dv, piece, piece.key, piece.columns)
    return [x.finished().to(value.dtype) for x in (value_sum, *sums)]


def _results(value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the output and the log-sum-exp. A token's heads are adjacent in memory, so that joining them later needs
    no copy.
    """
    batch, heads, length, head_dim = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.empty(batch, length, heads, head_dim, dtype=dtype, device=query.device).transpose(1, 2)
    return out, torch.empty(batch, heads, length, dtype=dtype, device=query.device)


def _pieces(bands: Sequence[int], query: Tensor, value: Tensor) -> Iterator[tuple[int, BlockPiece]]:
    length = value.shape[2]
    for index, start in enumerate(range(0, len(bands), 4)):
        low, *limits = bands[start : start + 4]
        high, first_keys, chunk = (None if limit < 0 else limit for limit in limits)
        for piece in cover(Band(low, high, first_keys, chunk), length - query.shape[2], length):
            yield index, piece


def _numbers(bands: Sequence[Band]) -> list[int]:
    """Return low, high, first_keys and chunk of each band as one flat list, with -1 for None."""
    numbers = [number for band in bands for number in (band.low, band.high, band.first_keys, band.chunk)]
    return [-1 if number is None else number for number in numbers]


def _fake(
    scale: float, bands: Sequence[int], value: Tensor, operands: Sequence[Tensor], sinks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    out, lse = _results(value, operands[0])
    return out.to(value.dtype), lse


def _fake_gradients(
    scale: float, bands: Sequence[int], grad: Tensor, out: Tensor, lse: Tensor, value: Tensor, operands: list[Tensor]
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (value, *operands)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    scale, bands, value, operands, sinks = inputs
    ctx.save_for_backward(*output, *sinks, value, *operands)
    ctx.options, ctx.has_sinks = (scale, bands), bool(sinks)


def _backward(ctx: Any, grad: Tensor, lse_grad: None) -> tuple[Any, ...]:
    out, lse, *saved = ctx.saved_tensors  # read only once: activation recomputation provides them once
    sinks, (value, *operands) = saved[: ctx.has_sinks], saved[ctx.has_sinks :]
    value_grad, *grads = _gradient_operation(*ctx.options, grad, out, lse, value, operands)
    return None, None, value_grad, grads, [_sink_gradient(sink, grad, out, lse) for sink in sinks]


def _sink_gradient(sink: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the sink logits, [heads]. The gradient of a score is p (dp - sum_j p_j dp_j); for a sink dp = 0,
    because its value is 0.
    """
    row = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sink.to(lse.dtype)[:, None] - lse).exp() * row).sum((0, 2)).to(sink.dtype)


_GIVEN = "float scale, int[] bands"
_gradient_operation = operation(
    "merge_gradients",
    f"({_GIVEN}, Tensor grad, Tensor out, Tensor lse, Tensor value, Tensor[] operands) -> Tensor[]",
    merge_gradients,
    _fake_gradients,
)
_operation = operation(
    "merge",
    f"({_GIVEN}, Tensor value, Tensor[] operands, Tensor[] sinks) -> (Tensor, Tensor)",
    merge,
    _fake,
    _keep,
    _backward,
)
