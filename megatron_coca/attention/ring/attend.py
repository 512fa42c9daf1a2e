"""Attention over a sequence that several ranks divide."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_coca.attention.backends.merge import MergeBackend, add_sink, sink_gradient
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.inputs import AttentionInputs, Backend
from megatron_coca.attention.ring.dense import DenseBackward, DenseForward
from megatron_coca.attention.ring.exchange import Message, Ring, add_keys, keys_of, packed, unpacked, whole
from megatron_coca.attention.ring.flash import FlashBackward, FlashForward
from megatron_coca.attention.ring.plan import KeySlice, RingPlan, Round, ring_plan
from megatron_coca.attention.ring.rounds import Attended, Backward, Forward, Keys, Queries, Scoring


class Kernel(NamedTuple):
    """The functions that start the forward and the backward pass of a ring."""

    forward: Callable[[Scoring, RingPlan, Queries, int], Forward]
    backward: Callable[[Scoring, RingPlan, Queries, Attended], Backward]


KERNELS: dict[type, Kernel] = {
    MergeBackend: Kernel(FlashForward, FlashBackward),
    ReferenceBackend: Kernel(DenseForward, DenseBackward),
}
"""The kernel for each backend that a ring can use."""


def ring_attend(backend: Backend, inputs: AttentionInputs, ring: Ring, length: int) -> Tensor:
    """Compute attention over `length` tokens that the ranks of `ring` divide: [batch, heads, own tokens, width of V] in
    the query's dtype. Every rank must call this, with the same bands and documents.

    The operands, values and gates have only this rank's tokens; `documents` are those of all tokens. Gradients of keys
    and values are sums over the queries of all ranks. Gradients of sinks and bias coefficients are sums over only this
    rank's queries. All sums have a fixed order.
    """
    bands = tuple(segment.band for segment in inputs.segments)
    plan = ring_plan(ring.division(length), ring.rank, bands, inputs.documents)
    call = _Call(KERNELS[type(backend)], Scoring(inputs.scale, bands, inputs.bias, inputs.softcap), plan, ring)
    gates = None if inputs.gates is None else whole(inputs.gates, ring, length).double().cumsum(-1)
    coefficients = None if inputs.bias is None else inputs.bias.coefficients
    operands = [x for segment in inputs.segments for x in (segment.query, segment.key)]
    out: Tensor = _RingAttention.apply(call, coefficients, inputs.sinks, gates, inputs.value, *operands)
    return out


@dataclass(frozen=True)
class _Call:
    kernel: Kernel
    scoring: Scoring
    plan: RingPlan
    ring: Ring

    @property
    def held(self) -> KeySlice:
        """This rank's own keys."""
        return self.plan.rounds[0].received

    def rounds(self, value: Tensor, keys: Sequence[Tensor]) -> Iterator[tuple[Round, Keys | None]]:
        """Yield every round with its keys, or with None if the round reads no keys. While a round is computed, the keys
        of the next round are being received.
        """
        first, *others = self.plan.rounds
        coming = self._post(others[0], value, keys) if others else None
        yield first, Keys(value, keys)
        for index, each in enumerate(others):
            assert coming is not None
            flat = coming.wait()
            coming = self._post(others[index + 1], value, keys) if index + 1 < len(others) else None
            yield each, None if flat is None else self._keys(each.received, flat, value, keys)

    def _post(self, each: Round, value: Tensor, keys: Sequence[Tensor]) -> Message:
        def sent() -> Tensor | None:
            needed = each.sent
            if not len(needed):
                return None
            return packed([keys_of(x, needed, self.held) for x in (value, *(keys[n] for n in needed.segments))])

        received = value.new_empty(sum(map(torch.Size.numel, self.shapes(each.received, value, keys))))
        return Message(self.ring, each.target, sent(), each.source, received if len(each.received) else None)

    @staticmethod
    def shapes(needed: KeySlice, value: Tensor, keys: Sequence[Tensor]) -> list[torch.Size]:
        """Return the shapes of the values and the operands in a message."""
        parts = (value, *(keys[n] for n in needed.segments))
        return [torch.Size((*x.shape[:2], len(needed), x.shape[3])) for x in parts]

    def _keys(self, needed: KeySlice, flat: Tensor, value: Tensor, keys: Sequence[Tensor]) -> Keys:
        values, *operands = unpacked(flat, self.shapes(needed, value, keys))
        by_segment = dict(zip(needed.segments, operands, strict=True))
        return Keys(values, [by_segment.get(index) for index in range(len(keys))])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        coefficients: Tensor | None,
        sinks: Tensor | None,
        gates: Tensor | None,
        value: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        queries, keys = Queries(operands[::2], gates), operands[1::2]
        state = call.kernel.forward(call.scoring, call.plan, queries, value.shape[-1])
        for each, part in call.rounds(value, keys):
            if part is not None:
                state.add(each, part)
        out, lse = state.finished()
        if sinks is not None:
            add_sink(out, lse, sinks)
        out = out.to(value.dtype)
        ctx.call = call
        ctx.save_for_backward(out, lse, sinks, gates, value, *operands)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, sinks, gates, value, *operands = ctx.saved_tensors
        call, queries, keys = ctx.call, Queries(operands[::2], gates), operands[1::2]
        state = call.kernel.backward(call.scoring, call.plan, queries, Attended(out, grad, lse))
        sums: list[Tensor] = []
        returning: tuple[Round, Message] | None = None
        for each, part in call.rounds(value, keys):
            found = None if part is None else state.add(each, part)
            if each is call.plan.rounds[0]:
                assert found is not None
                sums = [found.value, *(x for x in found.operands if x is not None)]
                continue
            arrived, returning = returning, (each, _returned(call, each, found, value, keys))
            _add(call, arrived, sums, value, keys)
        _add(call, returning, sums, value, keys)
        query_grads, coefficient_grad, gate_grad = state.finished()
        flat = [x.to(value.dtype) for pair in zip(query_grads, sums[1:], strict=True) for x in pair]
        sink_grad = None if sinks is None else sink_gradient(sinks, grad, out, lse)
        return None, coefficient_grad, sink_grad, gate_grad, sums[0].to(value.dtype), *flat


def _returned(call: _Call, each: Round, found: Keys | None, value: Tensor, keys: Sequence[Tensor]) -> Message:
    """Begin to return the gradients of a round's keys to their rank, and to receive the gradients of the keys that this
    rank sent in that round.
    """
    sent = (
        None if found is None else packed([x.to(value.dtype) for x in (found.value, *found.operands) if x is not None])
    )
    received = value.new_empty(sum(map(torch.Size.numel, call.shapes(each.sent, value, keys))))
    return Message(call.ring, each.source, sent, each.target, received if len(each.sent) else None)


def _add(
    call: _Call, arrived: tuple[Round, Message] | None, sums: list[Tensor], value: Tensor, keys: Sequence[Tensor]
) -> None:
    """Add the gradients that another rank has returned to the sums of the values and of each segment's keys."""
    if arrived is None or (flat := arrived[1].wait()) is None:
        return
    needed = arrived[0].sent
    totals = [sums[0], *(sums[1 + index] for index in needed.segments)]
    for total, part in zip(totals, unpacked(flat, call.shapes(needed, value, keys)), strict=True):
        add_keys(total, part, needed, call.held)
