"""Attention over several segments: flash calls without masks, merged by their log-sum-exp. This needs O(N) memory and
computes each pair once.

The visible pairs are divided into pieces that need no mask. If the kernel supports windows, a band of distances is one
piece. A row's output is the sum of its pieces' outputs, each weighted by its share of the softmax denominator. The
backward pass calls the flash kernel's backward for each piece with the merged output and log-sum-exp, so the softmax
weights are those of the complete row and the gradients are exact.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_coca.attention.backends.gated import attend_gated
from megatron_coca.attention.backends.pieces import BlockPiece, cover
from megatron_coca.attention.backends.sdpa import CpuFlash, CudaFlash, flash_op, with_key_heads
from megatron_coca.attention.inputs import AttentionInputs, Band, Needs, attend_by_document, attend_padded
from megatron_coca.kernels.custom_op import operation

MAX_CUDA_HEAD_DIM = 256


class MergeBackend:
    """Merged flash calls for any number of segments with any bands."""

    def supports(self, needs: Needs) -> str | None:
        """Return None, or the reason why the model is not supported."""
        if needs.device_type not in ("cpu", "cuda"):
            return f"PyTorch has flash kernels for CPU and CUDA, but not for {needs.device_type}"
        if needs.bias:
            return "its kernel calls have no mask, and therefore no bias"
        if needs.ring and needs.gates:
            return "with context_parallel_size, its rounds have no forgetting gates"
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


class Accumulator:
    """A tensor [batch, heads, length, ...] to which pieces are added, and a record of the rows written so far.

    The tensor is not cleared first. Instead, the first piece of a row overwrites the row, and a piece with all rows
    replaces the tensor. For ReRoPE, this avoids clearing and reading most of the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._written = bytearray(tensor.shape[2])

    def first(self, piece: BlockPiece, start: int, size: int, fill: float = 0.0) -> bool:
        """Mark the rows of a piece as written. Return True if none of these rows was written before. Otherwise set the
        rows that were not written before to `fill`, and return False.
        """
        spans = [(start + block * piece.step, start + block * piece.step + size) for block in range(piece.blocks)]
        first = all(self._written.find(1, low, high) < 0 for low, high in spans)
        for low, high in spans:
            if not first:
                self._fill(low, high, fill)
            self._written[low:high] = bytes([1]) * (high - low)
        return first

    def put(self, result: Tensor, piece: BlockPiece, start: int, size: int) -> None:
        """Write a kernel result to the rows of a piece."""
        result, like = _restore(result, piece), self.tensor
        if size == like.shape[2] and result.dtype == like.dtype and result[:, 0].stride() == like.stride():
            self.tensor = result[:, 0]
        else:
            _view(like, piece, start, size).copy_(result)

    def add(self, result: Tensor, piece: BlockPiece, start: int, size: int) -> None:
        """Add a kernel result to the rows of a piece."""
        if self.first(piece, start, size):
            self.put(result, piece, start, size)
        else:
            _view(self.tensor, piece, start, size).add_(_restore(result, piece))

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


def _sum_dtype(x: Tensor, spans: Sequence[tuple[int, int]], others: int = 0) -> torch.dtype:
    """Return the dtype in which terms of the dtype of `x` are summed. Each span (start, size) adds one term to its
    rows, and `others` terms are added to all rows. A sum of two terms needs no wider dtype, because it is rounded only
    once.
    """
    terms = max((sum(low <= start < low + size for low, size in spans) for start, _ in spans), default=0)
    return x.dtype if terms + others <= 2 else torch.promote_types(x.dtype, torch.float32)


def merge(
    scale: float, bands: Sequence[int], value: Tensor, operands: Sequence[Tensor], sinks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the output in the query's dtype and the log-sum-exp [batch, heads, query_length] in float32 or better.

    `operands` are the query and key of each segment. `bands` is the result of `_numbers`, four numbers per segment.
    `sinks` is empty or contains one tensor [heads], which is included in the log-sum-exp.
    """
    op, query = flash_op(value), operands[0]
    pieces = _pieces(bands, query, value, op.windows)
    dtype = _sum_dtype(query, [piece.query_span for _, piece in pieces], len(sinks))
    out, lse = (Accumulator(x) for x in results(value, query, dtype))
    add_pieces(op, scale, pieces, value, operands[::2], operands[1::2], out, lse)
    for sink in sinks:
        add_sink(out.tensor, lse.tensor, sink)
    return out.tensor.to(value.dtype), lse.tensor


def add_pieces(
    op: CpuFlash | CudaFlash,
    scale: float,
    pieces: Sequence[tuple[int, BlockPiece]],
    value: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    out: Accumulator,
    lse: Accumulator,
) -> None:
    """Add pieces, each with the index of its segment, to an output and its log-sum-exp. `queries` and `keys` have one
    operand per segment; segments without pieces need no keys.
    """
    for index, piece in pieces:
        q, k = queries[index], keys[index]
        assert k is not None
        piece_out, piece_lse = op.forward(
            _queries(q, piece), _keys(k, piece), _keys(value, piece), piece.shape != "full", scale, piece.window
        )
        span = (piece, piece.query, piece.rows)
        lse.first(*span, fill=-torch.inf)
        if out.first(*span):
            out.put(piece_out, *span)
            lse.put(piece_lse, *span)
        else:
            # The piece's share is exp(piece_lse) / (exp(lse) + exp(piece_lse)): 1 for a row that has seen no keys yet,
            # and never NaN, because every row of a piece sees a key.
            totals, piece_lse = _view(lse.tensor, *span), _restore(piece_lse, piece)
            _move(_view(out.tensor, *span), _restore(piece_out, piece), torch.sigmoid(piece_lse - totals)[..., None])
            totals.copy_(torch.logaddexp(totals, piece_lse))


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """Include the sink logits [heads] in an output and its log-sum-exp, in place. A sink is like one more piece with
    output 0.
    """
    score = sink.to(lse.dtype)[:, None]
    out.mul_(torch.sigmoid(lse - score)[..., None])
    lse.copy_(torch.logaddexp(lse, score))


def _move(rows: Tensor, result: Tensor, share: Tensor) -> None:
    """Replace `rows` by (1 - share) rows + share result, computed in the dtype of `share`."""
    if rows.dtype == share.dtype:
        rows.lerp_(result.to(rows.dtype), share)
    else:  # `lerp_` would need copies of both in the dtype of `share`
        torch.addcmul(result * share, rows, 1 - share, out=rows)


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
    op = flash_op(value)
    pieces = _pieces(bands, operands[0], value, op.windows)
    spans: list[list[tuple[int, int]]] = [[] for _ in (value, *operands)]
    for index, piece in pieces:
        spans[0].append(piece.key_span)
        spans[2 * index + 1].append(piece.query_span)
        spans[2 * index + 2].append(piece.key_span)
    value_sum, *sums = (
        Accumulator(torch.empty_like(x, dtype=_sum_dtype(x, each)))
        for x, each in zip((value, *operands), spans, strict=True)
    )
    add_gradients(op, scale, pieces, (grad, out, lse), value, operands[::2], operands[1::2], (value_sum, *sums))
    return [x.finished().to(value.dtype) for x in (value_sum, *sums)]


def add_gradients(
    op: CpuFlash | CudaFlash,
    scale: float,
    pieces: Sequence[tuple[int, BlockPiece]],
    rows: tuple[Tensor, Tensor, Tensor],
    value: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    sums: Sequence[Accumulator],
) -> None:
    """Add the gradients of pieces to `sums`, which has one sum for the value, followed by those for the query and the
    key of each segment. `rows` are the gradient of the output, the output and the log-sum-exp. The other arguments are
    those of `add_pieces`.
    """
    grad, out, lse = rows
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    for index, piece in pieces:
        q, k = queries[index], keys[index]
        assert k is not None
        dq, dk, dv = op.backward(
            _queries(grad, piece),
            _queries(q, piece),
            _keys(k, piece),
            _keys(value, piece),
            _queries(out, piece),
            _queries(lse, piece),
            piece.shape != "full",
            scale,
            piece.window,
        )
        sums[2 * index + 1].add(dq, piece, piece.query, piece.rows)
        sums[2 * index + 2].add(dk, piece, piece.key, piece.columns)
        sums[0].add(dv, piece, piece.key, piece.columns)


def results(value: Tensor, query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the output, in `dtype`, and the log-sum-exp. A token's heads are adjacent in memory, so that joining
    them later needs no copy.
    """
    batch, heads, length, head_dim = query.shape
    out = torch.empty(batch, length, heads, head_dim, dtype=dtype, device=query.device).transpose(1, 2)
    wide = torch.promote_types(query.dtype, torch.float32)
    return out, torch.empty(batch, heads, length, dtype=wide, device=query.device)


def _pieces(bands: Sequence[int], query: Tensor, value: Tensor, windows: bool) -> list[tuple[int, BlockPiece]]:
    """Return the pieces of every segment, each with the index of the segment."""
    length, pieces = value.shape[2], []
    for index, start in enumerate(range(0, len(bands), 4)):
        low, *limits = bands[start : start + 4]
        high, first_keys, chunk = (None if limit < 0 else limit for limit in limits)
        band = Band(low, high, first_keys, chunk)
        pieces += [(index, piece) for piece in cover(band, length - query.shape[2], length, windows)]
    return pieces


def _numbers(bands: Sequence[Band]) -> list[int]:
    """Return low, high, first_keys and chunk of each band as one flat list, with -1 for None."""
    numbers = [number for band in bands for number in (band.low, band.high, band.first_keys, band.chunk)]
    return [-1 if number is None else number for number in numbers]


def _fake(
    scale: float, bands: Sequence[int], value: Tensor, operands: Sequence[Tensor], sinks: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return results(value, operands[0], value.dtype)


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
    return None, None, value_grad, grads, [sink_gradient(sink, grad, out, lse) for sink in sinks]


def sink_gradient(sink: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the sink logits, [heads]. The gradient of a score is p (dp - sum_j p_j dp_j). For a sink,
    dp is 0, because its value is 0.
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
