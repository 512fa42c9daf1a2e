"""Packed documents on backends that know of none: attention document by document, written into place."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from megatron_coca.attention.inputs import AttentionInputs, Segment

aten = torch.ops.aten
GROUPED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 5)
"""Whether PyTorch's attention takes fewer key heads than query heads; the CPU kernel of 2.3 reads past their end."""
Gradients = tuple[Tensor, Tensor, Tensor]


class FlashOp(Protocol):
    """One flash kernel. Operands are [batch, heads, length, head_dim], the log-sum-exp [batch, heads, length]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp of the scaled scores, natural base)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """Gradients of q, k and v."""
        ...


class CpuFlash:
    """The CPU kernel: float64, float32, bfloat16, float16, fewer key heads than query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )


class CudaFlash:
    """FlashAttention-2 as PyTorch ships it: bfloat16 and float16, fewer key heads than query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        lengths = (q.shape[2], k.shape[2])
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, offset, scale=scale
        )


class CudaEfficient:
    """The memory-efficient kernel: float32. Its log-sum-exp is padded to 32 rows, with +inf where there is no row."""

    ROWS = 32

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % self.ROWS), value=torch.inf).contiguous()
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, wide_k, wide_v, None, out, padded, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


class EqualHeads:
    """A kernel for as many key heads as query heads, which are repeated for it."""

    def __init__(self, kernel: FlashOp) -> None:
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return self._kernel.forward(q, k, v, causal, scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        groups = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        dq, dk, dv = self._kernel.backward(grad, q, wide_k, wide_v, out, lse, causal, scale)
        return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


_CPU: dict[torch.dtype, Callable[[], FlashOp]] = dict.fromkeys(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16), CpuFlash
)
_OPS: dict[str, dict[torch.dtype, Callable[[], FlashOp]]] = {
    "cpu": _CPU,
    "cuda": {torch.bfloat16: CudaFlash, torch.float16: CudaFlash, torch.float32: CudaEfficient},
}


def flash_op(x: Tensor) -> FlashOp:
    """The kernel for the device and dtype of `x`.

    Raises:
        TypeError: there is none.
    """
    kinds = _OPS.get(x.device.type, {})
    if x.dtype not in kinds:
        raise TypeError(
            f"attention_backend merge has no kernel for {x.dtype} on {x.device.type}; "
            "set attention_backend: reference, or use another precision"
        )
    kernel = kinds[x.dtype]()
    return kernel if GROUPED else EqualHeads(kernel)


Span = tuple[int, int]


def attend_by_document(attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs) -> Tensor:
    """`attend` applied to every document by itself: exact, differentiable, [batch, heads, query_length, head_dim].

    A document sees only itself, and distances are differences, so a slice of the tokens is attention of its own. Rows
    of the batch with the same documents are served together.

    Raises:
        ValueError: the documents of a row leave out some of its queries.
    """
    if inputs.documents is None:
        return attend(inputs)
    groups: dict[tuple[Span, ...], list[int]] = {}
    for row, spans in enumerate(inputs.documents.spans):
        groups.setdefault(spans, []).append(row)
    outputs = [_attend_rows(attend, inputs, rows, spans) for spans, rows in groups.items()]
    if len(outputs) == 1:
        return outputs[0]
    order = torch.tensor([row for rows in groups.values() for row in rows])
    return torch.cat(outputs).index_select(0, order.argsort().to(inputs.value.device))


def _attend_rows(
    attend: Callable[[AttentionInputs], Tensor], inputs: AttentionInputs, rows: list[int], spans: tuple[Span, ...]
) -> Tensor:
    _check_cover(spans, inputs.past, inputs.value.shape[2], rows[0])
    if len(rows) < inputs.value.shape[0]:
        inputs = _map_operands(inputs, lambda x: x[rows])
    outputs = [attend(document) for document in _slices(inputs, spans)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _check_cover(spans: tuple[Span, ...], past: int, length: int, row: int) -> None:
    reached = past
    for start, stop in spans:
        if stop > past:
            if start > reached:
                break
            reached = stop
    if reached != length:
        raise ValueError(
            f"row {row}: the documents {spans} do not cover its tokens {past} to {length} one after another"
        )


def _slices(inputs: AttentionInputs, spans: tuple[Span, ...]) -> Iterator[AttentionInputs]:
    """The inputs of every document that has a query."""
    past = inputs.past
    for start, stop in spans:
        if stop <= past:
            continue
        first = max(start - past, 0)
        segments = tuple(
            Segment(part.query[:, :, first : stop - past], part.key[:, :, start:stop], part.band)
            for part in inputs.segments
        )
        yield inputs.replace(segments=segments, value=inputs.value[:, :, start:stop], documents=None)


def _map_operands(inputs: AttentionInputs, change: Callable[[Tensor], Tensor]) -> AttentionInputs:
    segments = tuple(Segment(change(part.query), change(part.key), part.band) for part in inputs.segments)
    return inputs.replace(segments=segments, value=change(inputs.value))
