"""Where the packed matrices of a block are cut among tensor ranks: in training, and in layouts with a file per rank.

Attention is cut by heads and the feed-forward layer by inner features, as GPT-NeoX and Megatron cut them.
"""

import re
from typing import Any, NamedTuple

from megatron_coca.checkpoints.state import Shard
from megatron_coca.config.model import GATED_ACTIVATIONS, ModelConfig


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
        """As DeepSpeed's AutoTP has it in its `partition_config`."""
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
