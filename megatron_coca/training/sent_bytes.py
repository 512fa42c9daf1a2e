"""The bytes that attention sends between the ranks of a sequence, counted from the shapes and the plan of the ring."""

from typing import NamedTuple

from megatron_coca.attention.build import build_methods
from megatron_coca.attention.method import PositionMethod
from megatron_coca.attention.ring.plan import Division, ring_plan
from megatron_coca.config import Config, ModelConfig
from megatron_coca.config.model import GAU
from megatron_coca.model.cost import BYTES
from megatron_coca.training.topology import Topology


class SentBytes(NamedTuple):
    """Bytes sent by all ranks of a sequence in a training step, per token of the sequence, in all layers.

    Attributes:
        exchange: bytes sent by the all-to-all of sequence_parallel_size.
        ring: bytes sent in the rounds of context_parallel_size, if every sequence is one document.
    """

    exchange: float
    ring: float


def sent_by_attention(config: Config, topology: Topology) -> SentBytes:
    """Count the bytes that attention sends. Activation checkpointing repeats the messages of the forward pass."""
    size, again = BYTES[config.precision.dtype], int(config.model.checkpoint_activations)
    exchange = ring = 0.0
    for name, method in build_methods(config).items():
        layers, shape = config.model.layer_names.count(name), config.model.with_heads(name)
        if topology.sequence > 1:
            # Queries, outputs, keys and values. With latent attention, they are exchanged instead of the latents.
            numbers = (shape.num_attention_heads + shape.num_kv_heads) * (shape.score_dim + shape.value_dim)
            exchange += (2 + again) * layers * numbers * (1 - 1 / topology.sequence)
        if topology.context > 1:
            ring += (3 + again) * layers * _ring_numbers(method, shape, name, topology.context)
    return SentBytes(exchange * size, ring * size)


def _ring_numbers(method: PositionMethod, shape: ModelConfig, name: str, ranks: int) -> float:
    """Count the numbers per token that the forward pass of one layer sends."""
    length = shape.seq_length
    kv_heads = shape.gau_features // method.head_dim if name == GAU else shape.num_kv_heads
    total, of_value = 0, method.head_dim if name == GAU else shape.value_dim
    for rank in range(ranks):
        for each in ring_plan(Division(length, ranks), rank, method.trained_bands, None).rounds[1:]:
            width = of_value + len(each.received.segments) * method.operand_dim
            total += len(each.received) * width
    return total * kv_heads / length
