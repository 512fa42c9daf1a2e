"""What each tensor rank of GPT-NeoX holds of a weight, and the whole weight from what all ranks hold.

What `split` gives, `merge` puts together again bit by bit.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_coca.checkpoints.state import Shard

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


class Division(Protocol):
    """How a weight lies among tensor ranks."""

    def whole(self, part: Shape, count: int) -> Shape:
        """The shape of the whole weight, from that of one of `count` parts."""

    def fits(self, part: Shape, count: int) -> bool:
        """Whether one of `count` parts may have this shape."""

    def merge(self, parts: Sequence[Tensor], name: str) -> Tensor:
        """The whole weight from the parts of all ranks; `name` is for messages."""

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        """The parts of `count` ranks."""


@dataclass(frozen=True)
class Parts:
    """Cut along `dim`: of each of the blocks, whose sizes are given, a rank has one part."""

    dim: int
    blocks: tuple[int, ...]

    def whole(self, part: Shape, count: int) -> Shape:
        return (*part[: self.dim], part[self.dim] * count, *part[self.dim + 1 :])

    def fits(self, part: Shape, count: int) -> bool:
        divided = all(block % count == 0 for block in self.blocks)
        return divided and len(part) > self.dim and part[self.dim] * count == sum(self.blocks)

    def merge(self, parts: Sequence[Tensor], name: str) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        whole = parts[0].new_empty(self.whole(tuple(parts[0].shape), len(parts)))
        for index, part in enumerate(parts):
            Shard(self.dim, index, len(parts), self.blocks).place(part, whole)
        return whole

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        return [Shard(self.dim, index, count, self.blocks).cut(whole) for index in range(count)]


@dataclass(frozen=True)
class Copies:
    """Whole on every rank. Copies that have drifted apart are averaged, as GPT-NeoX's own conversion does."""

    def whole(self, part: Shape, count: int) -> Shape:
        return part

    def fits(self, part: Shape, count: int) -> bool:
        return True

    def merge(self, parts: Sequence[Tensor], name: str) -> Tensor:
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0]
        logger.warning("%s: the copies of its %d tensor ranks differ; their mean is taken", name, len(parts))
        return torch.stack([part.float() for part in parts]).mean(0).to(parts[0].dtype)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        return [whole] * count


@dataclass(frozen=True)
class Sum:
    """A bias that every rank adds to its part before the parts are summed: the ranks' biases together are the bias.

    So it is in GPT-NeoX with `gpt_j_residual`, where the sum over ranks is put off to the end of the block.
    """

    def whole(self, part: Shape, count: int) -> Shape:
        return part

    def fits(self, part: Shape, count: int) -> bool:
        return True

    def merge(self, parts: Sequence[Tensor], name: str) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        return [whole, *(torch.zeros_like(whole) for _ in range(count - 1))]
