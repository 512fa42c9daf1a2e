"""Messages between the ranks of a ring. Each message is posted before the computation during which it is sent."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_coca.attention.ring.plan import Division, KeySlice


class Ring(NamedTuple):
    """The ranks that divide a sequence.

    Attributes:
        group: the process group of these ranks, in order.
        rank: this rank's index in the group.
        ranks: number of ranks.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int

    def division(self, length: int) -> Division:
        """Return the division of `length` tokens."""
        return Division(length, self.ranks)


class Message:
    """An exchange in progress, in which this rank sends one tensor to one rank and receives one from another rank.
    Either tensor may be missing. The tensors must not change before `wait` returns.
    """

    def __init__(self, ring: Ring, target: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        """Begin to send `sent` to rank `target` of the ring, and to receive into `received` from rank `source`."""
        self._tensors = (sent, received)  # keeps both tensors in memory
        both = ((dist.isend, sent, target), (dist.irecv, received, source))
        operations = [
            dist.P2POp(function, tensor.view(torch.uint8), dist.get_global_rank(ring.group, peer), ring.group)
            for function, tensor, peer in both
            if tensor is not None and tensor.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """Wait until both tensors are exchanged, and return the received one."""
        for work in self._works:
            work.wait()
        return self._tensors[1]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype to one flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of a flat tensor with these shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(*shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def keys_of(x: Tensor, needed: KeySlice, held: KeySlice) -> Tensor:
    """Return the keys of the tokens in `needed`. The rows of x [batch, heads, tokens, width] are the keys of the tokens
    in `held`.
    """
    parts = [x.narrow(2, held.index(tokens.start), len(tokens)) for tokens in needed.ranges if len(tokens)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def add_keys(total: Tensor, part: Tensor, needed: KeySlice, held: KeySlice) -> None:
    """Add `part` to `total` in place. `part` has the rows of the tokens in `needed`, and `total` has the rows of the
    tokens in `held`.
    """
    first = 0
    for tokens in needed.ranges:
        if len(tokens):
            total.narrow(2, held.index(tokens.start), len(tokens)).add_(part.narrow(2, first, len(tokens)))
            first += len(tokens)


class _Whole(torch.autograd.Function):
    """Gather [..., own tokens] from all ranks to [..., length]."""

    @staticmethod
    def forward(ctx: object, own: Tensor, ring: Ring, length: int) -> Tensor:
        ctx.ring, ctx.length = ring, length  # type: ignore[attr-defined]
        whole, first = own.new_zeros(*own.shape[:-1], length), 0
        for chunk in ring.division(length).chunks(ring.rank):
            whole[..., chunk.start : chunk.stop] = own[..., first : first + len(chunk)]
            first += len(chunk)
        dist.all_reduce(whole, group=ring.group)  # only one term of each sum is not 0
        return whole

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:
        ring: Ring = ctx.ring  # type: ignore[attr-defined]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ring.group)
        return ring.division(ctx.length).held(total, ring.rank), None, None  # type: ignore[attr-defined]


def whole(own: Tensor, ring: Ring, length: int) -> Tensor:
    """Gather the values of this rank's tokens [..., own tokens] and those of the other ranks to [..., length]. The
    gradient is summed over the ranks.
    """
    gathered: Tensor = _Whole.apply(own, ring, length)
    return gathered
