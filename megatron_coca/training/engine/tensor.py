"""Tensor parallelism through DeepSpeed's AutoTP: which matrices are cut, where, and what follows from it.

AutoTP replaces a linear layer by one that holds a part of its weight: of its rows, with the gradient of the input summed
over the ranks, or of its columns, with the output summed. Attention is cut by heads and the feed-forward layer by inner
features; embedding, head and norms are whole on every rank.
"""

import re
from typing import Any, NamedTuple

from deepspeed.utils import groups

from megatron_coca.attention.heads import HeadShare
from megatron_coca.checkpoints.state import Shard
from megatron_coca.config.model import GATED_ACTIVATIONS, ModelConfig
from megatron_coca.training.engine.division import Division

PER_HEAD = r".*\.(position_bias|positions\.bias|positions\.clex)\..*"
"""Learned parameters that every rank holds whole but uses for its own heads alone: each computes a part of their
gradient.
"""


class Cut(NamedTuple):
    """Layers cut alike.

    Attributes:
        layer: the end of their names.
        dim: of the weight; 0 cuts rows, and the bias with them, 1 cuts columns, and leaves the bias whole.
        blocks: sizes along `dim` of what is packed in the weight; each is cut by itself.
    """

    layer: str
    dim: int
    blocks: tuple[int, ...]

    def layer_spec(self) -> dict[str, Any]:
        """As AutoTP's `partition_config` has it."""
        spec: dict[str, Any] = {
            "patterns": [rf".*\.{re.escape(self.layer)}\.weight$"],
            "partition_type": ("column", "row")[self.dim],
        }
        packed = {"shape": [list(self.blocks), -1], "partition_dim": 0} if len(self.blocks) > 1 else {}
        return spec | packed

    def holds(self, name: str) -> bool:
        """Whether the named parameter is cut by this."""
        return name.endswith((f"{self.layer}.weight", f"{self.layer}.bias")[: 2 - self.dim])

    def shard(self, index: int, count: int) -> Shard:
        """What rank `index` of `count` has of such a parameter."""
        return Shard(self.dim, index, count, self.blocks)


def cuts(model: ModelConfig) -> tuple[Cut, ...]:
    """How the layers of a block are cut."""
    queries, keys = model.hidden_size, model.num_kv_heads * model.head_dim
    grouped, width = keys != queries, model.ffn_hidden_size
    return (
        # Head by head [q | k | v], or all queries, all keys, all values.
        Cut("attention.query_key_value", 0, (queries, keys, keys) if grouped else (3 * queries,)),
        Cut("attention.dense", 1, (queries,)),
        Cut("mlp.linear1", 0, (width, width) if model.activation in GATED_ACTIVATIONS else (width,)),
        Cut("mlp.linear2", 1, (width,)),
    )


class TensorDivision(Division):
    """Every matrix of a block cut among `size` ranks."""

    def __init__(self, model: ModelConfig, size: int) -> None:
        self._cuts, self._size = cuts(model), size

    def section(self) -> dict[str, Any]:
        summed = {"patterns": [PER_HEAD], "partition_type": "skip", "grad_allreduce": True}
        specs = [*(cut.layer_spec() for cut in self._cuts), summed]
        partition = {"use_default_specs": False, "layer_specs": specs}
        return {"tensor_parallel": {"autotp_size": self._size, "partition_config": partition}}

    def share(self) -> HeadShare:
        return HeadShare(groups.get_tensor_model_parallel_rank(), self._size)

    def shard(self, name: str) -> Shard | None:
        index = groups.get_tensor_model_parallel_rank()
        return next((cut.shard(index, self._size) for cut in self._cuts if cut.holds(name)), None)
