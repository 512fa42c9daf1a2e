"""Where GPT-NeoX keeps each weight: the number of a layer of its pipeline, a name in it, and how tensor ranks share it.

The pipeline of L blocks is: 0 the embedding, 1 no weights, 2 .. L+1 the blocks, L+2 no weights, L+3 the final norm, L+4
the output head, which is absent where it is the embedding's matrix.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_coca.attention.positions.bias import alibi_slopes
from megatron_coca.checkpoints.state import TensorShard, layer_shards
from megatron_coca.config import Config, ModelConfig

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]


class NeoxSharding(Protocol):
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
            TensorShard(self.dim, index, len(parts), self.blocks).place(part, whole)
        return whole

    def split(self, whole: Tensor, count: int) -> list[Tensor]:
        return [TensorShard(self.dim, index, count, self.blocks).cut(whole) for index in range(count)]


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


EMBEDDING, FIRST_BLOCK = 0, 2
WORDS = "word_embeddings.weight"
"""The table of tokens, in layer 0."""

NORMS: dict[str, dict[str, str]] = {
    "layernorm": {"weight": "weight", "bias": "bias"},
    "rmsnorm": {"weight": "scale"},
    "scalenorm": {"g": "g"},
    "non_parametric_layernorm": {},
}
"""The parameters of each norm: our names and theirs."""

LINEAR = ("attention.query_key_value", "attention.dense", "mlp.linear1", "mlp.linear2")
PARTIAL_SUMS = ("attention.dense.bias", "mlp.linear2.bias")


class NeoxLocation(NamedTuple):
    """Where a weight lies: the layer's number, and the name within it."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of layer {self.layer:02}"


@dataclass(frozen=True)
class Held:
    """What lies at a place.

    Attributes:
        ours: the name of the weight here.
        division: what each tensor rank has of it.
        used: whether GPT-NeoX computes with it; what it only keeps is written and not read.
    """

    ours: str
    division: NeoxSharding
    used: bool = True


class Buffer(NamedTuple):
    """Numbers that GPT-NeoX keeps with the weights though they follow from the configuration.

    Attributes:
        name: within each layer.
        blocks: whether it is in every block, or in the embedding.
        values: makes it, float32; None for what GPT-NeoX keeps only if asked to.
        division: among tensor ranks.
    """

    name: str
    blocks: bool
    values: Callable[[ModelConfig], Tensor] | None
    division: Callable[[ModelConfig], NeoxSharding] = lambda model: Copies()


def _inverse_frequencies(model: ModelConfig) -> Tensor:
    return 1.0 / 10000 ** (torch.arange(0, model.hidden_size, 2).float() / model.hidden_size)


BUFFERS: dict[str, Buffer] = {
    "rotary": Buffer("attention.rotary_emb.inv_freq", True, None),
    "alibi": Buffer(
        "attention.alibi_embed.slopes",
        True,
        lambda model: torch.tensor(alibi_slopes(model.num_attention_heads)),
        lambda model: Parts(0, (model.num_attention_heads,)),
    ),
    "sinusoidal": Buffer("position_embeddings.inv_freq", False, _inverse_frequencies),
}
"""By `pos_emb`. They are made here, and never read."""


def blocks(model: ModelConfig) -> range:
    """The numbers of the transformer blocks."""
    return range(FIRST_BLOCK, FIRST_BLOCK + model.num_layers)


def layers(model: ModelConfig) -> tuple[int, ...]:
    """The numbers of all layers that keep a state dict."""
    norm = model.num_layers + 3
    return (EMBEDDING, *blocks(model), norm, *((norm + 1,) if model.no_weight_tying else ()))


def table(config: Config) -> dict[NeoxLocation, Held]:
    """All that may lie anywhere in a checkpoint of this model; biases that it does not have are among them."""
    model, position = config.model, config.position
    norm, words = model.num_layers + 3, Parts(0, (model.padded_vocab_size,))
    found = {NeoxLocation(EMBEDDING, WORDS): Held(f"embedding.{WORDS}", words)}
    if position.pos_emb == "learned":
        table_of_positions = "position_embeddings.weight"
        found[NeoxLocation(EMBEDDING, table_of_positions)] = Held(f"embedding.{table_of_positions}", Copies())
    for layer in blocks(model):
        found |= {NeoxLocation(layer, name): held for name, held in _block(config, layer - FIRST_BLOCK)}
    found |= {
        NeoxLocation(norm, f"norm.{theirs}"): Held(f"norm.{ours}", Copies())
        for ours, theirs in NORMS[model.norm].items()
    }
    if model.no_weight_tying:
        found[NeoxLocation(norm + 1, "final_linear.weight")] = Held("final_linear.weight", words)
    return found


def _block(config: Config, number: int) -> Iterator[tuple[str, Held]]:
    model, ours = config.model, f"blocks.{number}"
    unused = model.gpt_j_residual and model.gpt_j_tied
    for parameter, theirs in NORMS[model.norm].items():
        yield f"input_layernorm.{theirs}", Held(f"{ours}.input_layernorm.{parameter}", Copies())
        second = "input_layernorm" if unused else "post_attention_layernorm"
        yield f"post_attention_layernorm.{theirs}", Held(f"{ours}.{second}.{parameter}", Copies(), not unused)
    for name in (f"{layer}.{kind}" for layer in LINEAR for kind in ("weight", "bias")):
        yield name, Held(f"{ours}.{name}", _division(model, name))
    if config.position.pos_emb == "rpe":
        # One table for all blocks; GPT-NeoX writes it into each of them.
        yield "attention.rpe.weight", Held("positions.bias.weight", Parts(1, (model.num_attention_heads,)))


def _division(model: ModelConfig, name: str) -> NeoxSharding:
    cut = next((cut for cut in layer_shards(model) if cut.holds(name)), None)
    if cut is not None:
        return Parts(cut.dim, cut.blocks)
    return Sum() if model.gpt_j_residual and name in PARTIAL_SUMS else Copies()


def buffers(config: Config) -> dict[NeoxLocation, Buffer]:
    """Where a checkpoint may hold numbers that are no weights."""
    buffer = BUFFERS.get(config.position.pos_emb)
    if buffer is None:
        return {}
    numbers = blocks(config.model) if buffer.blocks else (EMBEDDING,)
    return {NeoxLocation(layer, buffer.name): buffer for layer in numbers}
