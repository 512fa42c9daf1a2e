"""Compute the rounds of a ring with PyTorch's flash kernels, for scores without bias, soft-capping and gates. This
needs linear memory and computes only visible pairs, like the backend `merge`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.merge import Accumulator, add_gradients, add_pieces, results
from megatron_coca.attention.backends.sdpa import flash_op
from megatron_coca.attention.ring.plan import RingPlan, Round
from megatron_coca.attention.ring.rounds import Attended, Keys, Queries, Scoring, in_row_order, rows_of


def _padded(x: Tensor, width: int) -> Tensor:
    """Append zeros, because the kernels need values as wide as the operands."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _of_group(keys: Keys, rows: tuple[int, ...] | None, width: int) -> tuple[Tensor, list[Tensor | None]]:
    operands = [None if key is None else rows_of(key, rows) for key in keys.operands]
    return _padded(rows_of(keys.value, rows), width), operands


class FlashForward:
    """The forward pass; see `Forward`."""

    def __init__(self, scoring: Scoring, plan: RingPlan, queries: Queries, width: int) -> None:
        """`width` is the width of V."""
        self._scale, self._groups, self._width = scoring.scale, plan.groups, width
        self._queries = [[rows_of(x, rows) for x in queries.operands] for rows in plan.groups]
        self._sums = []
        for operands in self._queries:
            dtype = torch.promote_types(operands[0].dtype, torch.float32)
            self._sums.append([Accumulator(x) for x in results(operands[0], operands[0], dtype)])

    def add(self, each: Round, keys: Keys) -> None:
        for rows, pieces, queries, (out, lse) in zip(self._groups, each.pieces, self._queries, self._sums, strict=True):
            value, operands = _of_group(keys, rows, queries[0].shape[-1])
            add_pieces(flash_op(value), self._scale, pieces, value, queries, operands, out, lse)

    def finished(self) -> tuple[Tensor, Tensor]:
        out, lse = (in_row_order([each[n].tensor for each in self._sums], self._groups) for n in range(2))
        return out[..., : self._width], lse


class FlashBackward:
    """The backward pass; see `Backward`."""

    def __init__(self, scoring: Scoring, plan: RingPlan, queries: Queries, result: Attended) -> None:
        self._scale, self._groups = scoring.scale, plan.groups
        width = queries.operands[0].shape[-1]
        padded = (_padded(result.grad, width), _padded(result.out, width), result.lse)
        self._queries = [[rows_of(x, rows) for x in queries.operands] for rows in plan.groups]
        self._rows = [[rows_of(x, rows) for x in padded] for rows in plan.groups]
        self._sums = [[_sum(x) for x in operands] for operands in self._queries]

    def add(self, each: Round, keys: Keys) -> Keys:
        found = []
        given = zip(self._groups, each.pieces, self._queries, self._rows, self._sums, strict=True)
        for rows, pieces, queries, (grad, out, lse), sums in given:
            value, operands = _of_group(keys, rows, queries[0].shape[-1])
            of_keys = [None if key is None else _sum(key) for key in operands]
            total, flat = _sum(value), []
            for query, key in zip(sums, of_keys, strict=True):
                flat += [query, key or query]  # a segment without keys has no pieces
            add_gradients(
                flash_op(value), self._scale, pieces, (grad, out, lse), value, queries, operands, (total, *flat)
            )
            found.append([total, *of_keys])
        width = keys.value.shape[-1]
        value_grad, *key_grads = (self._joined(parts) for parts in zip(*found, strict=True))
        assert value_grad is not None
        return Keys(value_grad[..., :width], key_grads)

    def finished(self) -> tuple[list[Tensor], None, None]:
        sums = [self._joined(parts) for parts in zip(*self._sums, strict=True)]
        return [total for total in sums if total is not None], None, None

    def _joined(self, parts: Sequence[Accumulator | None]) -> Tensor | None:
        tensors = [part.finished() for part in parts if part is not None]
        return in_row_order(tensors, self._groups) if tensors else None


def _sum(x: Tensor) -> Accumulator:
    """Return a sum with the shape of x, in float32 or better."""
    return Accumulator(torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32)))
