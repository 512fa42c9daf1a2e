"""The interface between the rounds of a ring and the code that computes a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_coca.attention.inputs import Band, DistanceBias
from megatron_coca.attention.ring.plan import Round


@dataclass(frozen=True)
class Scoring:
    """The values that determine the scores in addition to the operands and gates, named as in `AttentionInputs`."""

    scale: float
    bands: tuple[Band, ...]
    bias: DistanceBias | None = None
    softcap: float | None = None


class Keys(NamedTuple):
    """The keys of a round.

    Attributes:
        value: V [batch, kv_heads, keys, width of V].
        operands: K' of every segment, [batch, kv_heads, keys, head_dim], or None for a segment that reads no keys.
    """

    value: Tensor
    operands: Sequence[Tensor | None]


class Queries(NamedTuple):
    """This rank's queries.

    Attributes:
        operands: Q' of every segment, [batch, heads, own tokens, head_dim].
        gates: the running sums of the log gates of all tokens of the sequence, [batch, heads, length] float64, or None.
    """

    operands: Sequence[Tensor]
    gates: Tensor | None = None


class Attended(NamedTuple):
    """The output of all rounds [batch, heads, own tokens, width of V], its gradient, and the log-sum-exp of the scores
    [batch, heads, own tokens].
    """

    out: Tensor
    grad: Tensor
    lse: Tensor


class Forward(Protocol):
    """The forward pass. The first round reads a rank's own keys, so that afterwards every query has seen a key."""

    def add(self, each: Round, keys: Keys) -> None:
        """Add the pairs of a round."""
        ...

    def finished(self) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp, both in float32 or better."""
        ...


class Backward(Protocol):
    """The backward pass."""

    def add(self, each: Round, keys: Keys) -> Keys:
        """Add the pairs of a round, and return the gradients of its keys."""
        ...

    def finished(self) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Return the gradients of the queries, of the bias's coefficients and of the running sums of gates. The second
        is None without learned coefficients, and the third is None without gates.
        """
        ...


def rows_of(x: Tensor, rows: tuple[int, ...] | None) -> Tensor:
    """Select batch rows of x; None means all rows."""
    return x if rows is None else x[list(rows)]


def in_row_order(parts: Sequence[Tensor], groups: Sequence[tuple[int, ...] | None]) -> Tensor:
    """Join the batch rows of all groups, in the order of the batch."""
    if groups[0] is None:
        return parts[0]
    order = torch.tensor([row for rows in groups if rows is not None for row in rows])
    return torch.cat(list(parts)).index_select(0, order.argsort().to(parts[0].device))
