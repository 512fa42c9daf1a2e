"""Tensor parallelism through DeepSpeed's AutoTP, for the matrices that `checkpoints.cuts` names.

AutoTP replaces a linear layer by one that holds a part of its weight: of its rows, with the gradient of the input summed
over the ranks, or of its columns, with the output summed. Attention is cut by heads and the feed-forward layer by inner
features; embedding, head and norms are whole on every rank.
"""

from typing import Any

from deepspeed.utils import groups

from megatron_coca.attention.heads import HeadShare
from megatron_coca.attention.projection import PARTS
from megatron_coca.checkpoints.cuts import Cut, cuts
from megatron_coca.checkpoints.state import Shard
from megatron_coca.config.model import ModelConfig
from megatron_coca.training.engine.division import Division

PER_HEAD = r".*\.(position_bias|positions\.bias|positions\.clex)\..*"
"""Learned parameters that every rank holds whole but uses for its own heads alone: each computes a part of their
gradient.
"""


def _split_cuts(model: ModelConfig) -> tuple[Cut, ...]:
    """How a projection in three layers is cut: each as the rows that it has of the packed one."""
    queries, keys = model.hidden_size, model.num_kv_heads * model.head_dim
    return tuple(
        Cut(f"attention.query_key_value.{part}", 0, (size,))
        for part, size in zip(PARTS, (queries, keys, keys), strict=True)
    )


class TensorDivision(Division):
    """Every matrix of a block cut among `size` ranks."""

    def __init__(self, model: ModelConfig, size: int, positions_train: bool = True) -> None:
        """`positions_train` says whether what the position method learns has gradients."""
        self._size, self._positions_train = size, positions_train
        self._cuts, self._split_cuts = cuts(model), _split_cuts(model)

    def section(self) -> dict[str, Any]:
        summed = {"patterns": [PER_HEAD], "partition_type": "skip", "grad_allreduce": True}
        specs = [cut.layer_spec() for cut in (*self._cuts, *self._split_cuts)] + [summed] * self._positions_train
        partition = {"use_default_specs": False, "layer_specs": specs}
        return {"tensor_parallel": {"autotp_size": self._size, "partition_config": partition}}

    def share(self) -> HeadShare:
        return HeadShare(groups.get_tensor_model_parallel_rank(), self._size)

    def shard(self, name: str) -> Shard | None:
        index = groups.get_tensor_model_parallel_rank()
        return next((cut.shard(index, self._size) for cut in self._cuts if cut.holds(name)), None)
