"""What an engine does differently where several ranks hold or run one model: nothing, by default."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import _SeqAllToAll
from deepspeed.utils import groups
from torch import Tensor

from megatron_coca.attention.context import WHOLE, Draw, HeadShard
from megatron_coca.attention.layer import PARTS
from megatron_coca.checkpoints.state import LayerShards, TensorShard, layer_shards
from megatron_coca.config import Config
from megatron_coca.config.model import ModelConfig


class ModelDivision:
    """Every rank holds all weights, and sees all tokens of its samples."""

    def section(self) -> dict[str, Any]:
        """What DeepSpeed's configuration has for it."""
        return {}

    def grid(self) -> Any:
        """The process groups that DeepSpeed is to use (its `mpu`), or None for its own. Every rank must call it, once."""
        return None

    def share(self) -> HeadShard:
        """This rank's share, once DeepSpeed is initialized."""
        return WHOLE

    def shard(self, name: str) -> TensorShard | None:
        """Which part of the named parameter this rank holds, once DeepSpeed is initialized; None for all of it."""
        return None


TOKENS, HEADS = 1, 2
"""Dimensions of what is exchanged, [batch, length, heads, width]."""


@dataclass(frozen=True)
class SequenceShare(HeadShard):
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


class SequenceDivision(ModelDivision):
    """Every sequence divided among `size` ranks; each holds all weights."""

    def __init__(self, size: int, stage: int) -> None:
        """`stage` is the ZeRO stage that DeepSpeed runs."""
        self._size, self._averaged = size, stage == 3

    def grid(self) -> Any:
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:  # it refuses to be asked for the same groups again
            parallel_state_sp.initialize_sequence_parallel(self._size)
        return parallel_state_sp

    def share(self) -> HeadShard:
        group = parallel_state_sp.get_sequence_parallel_group()
        return SequenceShare(dist.get_rank(group), self._size, group, self._averaged)


PER_HEAD = r".*\.(position_bias|positions\.bias|positions\.clex)\..*"
"""Learned parameters that every rank holds whole but uses for its own heads alone: each computes a part of their
gradient.
"""


def _split_cuts(model: ModelConfig) -> tuple[LayerShards, ...]:
    """How a projection in three layers is cut: each as the rows that it has of the packed one."""
    queries, keys = model.hidden_size, model.num_kv_heads * model.head_dim
    return tuple(
        LayerShards(f"attention.query_key_value.{part}", 0, (size,))
        for part, size in zip(PARTS, (queries, keys, keys), strict=True)
    )


class TensorDivision(ModelDivision):
    """Every matrix of a block cut among `size` ranks."""

    def __init__(self, model: ModelConfig, size: int, positions_train: bool = True) -> None:
        """`positions_train` says whether what the position method learns has gradients."""
        self._size, self._positions_train = size, positions_train
        self._cuts, self._split_cuts = layer_shards(model), _split_cuts(model)

    def section(self) -> dict[str, Any]:
        summed = {"patterns": [PER_HEAD], "partition_type": "skip", "grad_allreduce": True}
        specs = [cut.layer_spec() for cut in (*self._cuts, *self._split_cuts)] + [summed] * self._positions_train
        partition = {"use_default_specs": False, "layer_specs": specs}
        return {"tensor_parallel": {"autotp_size": self._size, "partition_config": partition}}

    def share(self) -> HeadShard:
        return HeadShard(groups.get_tensor_model_parallel_rank(), self._size)

    def shard(self, name: str) -> TensorShard | None:
        index = groups.get_tensor_model_parallel_rank()
        return next((cut.shard(index, self._size) for cut in self._cuts if cut.holds(name)), None)


DIVISIONS: dict[str, Callable[[Config, int], ModelDivision]] = {
    "model_parallel_size": lambda config, size: TensorDivision(
        config.model, size, config.optimizer.trains("positions")
    ),
    "sequence_parallel_size": lambda config, size: SequenceDivision(size, config.parallel.stage),
}
"""By the key that gives the number of ranks; the configuration's checks let at most one be above 1."""


def division(config: Config) -> ModelDivision:
    """How ranks share the model."""
    sizes = {key: getattr(config.parallel, key) for key in DIVISIONS}
    return next((DIVISIONS[key](config, size) for key, size in sizes.items() if size > 1), ModelDivision())
