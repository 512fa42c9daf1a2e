"""Sequence parallelism as in DeepSpeed-Ulysses (Jacobs et al. 2023): a rank has a stretch of every sequence, and in
attention all tokens for a part of the heads.

The ranks' losses add up to that of the sequence, so their gradients must be summed over the ranks of a sequence, and
averaged over sequences. DeepSpeed does so up to ZeRO 2; ZeRO 3 averages over all of them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import _SeqAllToAll
from torch import Tensor

from megatron_coca.attention.heads import Draw, HeadShare
from megatron_coca.training.engine.division import Division

TOKENS, HEADS = 1, 2
"""Dimensions of what is exchanged, [batch, length, heads, width]."""


@dataclass(frozen=True)
class SequenceShare(HeadShare):
    """The share of a rank whose sequences are divided among the ranks of `group`, over which DeepSpeed averages
    gradients instead of summing them where `averaged` says so.
    """

    group: dist.ProcessGroup | None = None
    averaged: bool = False

    def split(self, tokens: Tensor) -> Tensor:
        return tokens.chunk(self.count, -1)[self.index]

    def gather(self, x: Tensor) -> Tensor:
        return _SeqAllToAll.apply(self.group, x, HEADS, TOKENS, 0)

    def scatter(self, x: Tensor) -> Tensor:
        return _SeqAllToAll.apply(self.group, x, TOKENS, HEADS, 0)

    def mean(self, loss: Tensor, loss_mask: Tensor | None) -> Tensor:
        weight: Tensor | float = 1 / self.count
        if loss_mask is not None:
            weight = self.split(loss_mask).sum() / loss_mask.sum().clamp(min=1)
        return _Sum.apply(loss * weight, self.group, self.count if self.averaged else 1)

    def agreed(self, draw: Draw, device: torch.device) -> Draw:
        factor, positions = draw
        first = torch.cat((positions.new_tensor([factor]), positions)).to(device)
        dist.broadcast(first, group=self.group, group_src=0)
        return int(first[0]), first[1:].cpu()


class _Sum(torch.autograd.Function):
    """The sum over ranks, each of which then follows the gradient of its own part, `scale` times as large."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, scale: int) -> Tensor:
        ctx.scale = scale
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.scale, None, None


class SequenceDivision(Division):
    """Every sequence divided among `size` ranks; each holds all weights."""

    def __init__(self, size: int, stage: int) -> None:
        """`stage` is the ZeRO stage that DeepSpeed runs."""
        self._size, self._averaged = size, stage == 3

    def grid(self) -> Any:
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:  # it refuses to be asked for the same groups again
            parallel_state_sp.initialize_sequence_parallel(self._size)
        return parallel_state_sp

    def share(self) -> HeadShare:
        group = parallel_state_sp.get_sequence_parallel_group()
        return SequenceShare(dist.get_rank(group), self._size, group, self._averaged)
