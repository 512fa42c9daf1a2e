"""Which heads and tokens of a model are this process's, where several processes hold or run one model together."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.inputs import DistanceBias

Bias = TypeVar("Bias", bound=DistanceBias | None)
Draw = tuple[int, Tensor]
"""What CLEX draws in training: a scaling factor and positions."""


@dataclass(frozen=True)
class HeadShare:
    """Part `index` of `count` equal parts of the query heads and of the key heads, each of consecutive heads.

    A process of this class projects to its own heads, and sees all tokens at every place of the model. Where it sees
    only a stretch of the tokens, a subclass exchanges tokens for heads.
    """

    index: int = 0
    count: int = 1

    def bias(self, bias: Bias) -> Bias:
        """A bias of all heads, narrowed to the own ones."""
        return bias if bias is None or self.count == 1 else bias.part(self.index, self.count)  # type: ignore[return-value]

    def split(self, tokens: Tensor) -> Tensor:
        """The own stretch of tokens [..., length]."""
        return tokens

    def gather(self, x: Tensor) -> Tensor:
        """[batch, own length, heads, width] of the projections -> [batch, length, own heads, width] for attention."""
        return x

    def scatter(self, x: Tensor) -> Tensor:
        """The way back: [batch, length, own heads, width] -> [batch, own length, heads, width]."""
        return x

    def mean(self, loss: Tensor, loss_mask: Tensor | None) -> Tensor:
        """The mean loss over all tokens, from that over the own stretch; `loss_mask` [batch, length] says which count."""
        return loss

    def agreed(self, draw: Draw, device: torch.device) -> Draw:
        """A random draw that all processes of one sequence have in common; `device` is where they communicate."""
        return draw


WHOLE = HeadShare()
"""All heads and tokens."""


class Shared(nn.Module):
    """A module that does its share of what several processes do together.

    Attributes:
        share: set by `take_share`; all of it by default.
    """

    share: HeadShare = WHOLE


def take_share(module: nn.Module, share: HeadShare) -> None:
    """Give every part of `module` that can be shared this share."""
    for part in module.modules():
        if isinstance(part, Shared):
            part.share = share
