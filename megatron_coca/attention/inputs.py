"""The contract between position methods and attention backends: every quantity that changes the result of attention."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class DistanceBias(Protocol):
    """A score bias given as a formula of the distance between query and key."""

    def at(self, distance: Tensor) -> Tensor:
        """[heads, ...] for float `distance` [...], in the dtype of `distance`."""
        ...


@dataclass(frozen=True)
class AttentionInputs:
    """Operands of causal attention: softmax(scale * Q' K'^T + bias) V.

    Attributes:
        query: Q' [batch, heads, query_length, head_dim].
        key: K' [batch, kv_heads, key_length, head_dim]; `heads` is a multiple of `kv_heads`, and query head h reads
        key head
            h // (heads / kv_heads).
        value: V, shaped like the key.
        scale: what the dot products are multiplied by. It has no default, because backends disagree about theirs.
        bias: added to the scaled scores, or None.
        dropout: probability with which an attention weight is dropped (0 in evaluation).

    The queries are the last `query_length` of the `key_length` tokens: query row i stands at key index key_length -
    query_length + i and sees the keys up to and including itself; the distance r of a pair is the difference of these
    indices. All three
    tensors share one dtype and device, and the output has the query's shape and dtype.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    bias: DistanceBias | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class Needs:
    """What a backend must be able to do for a model; known when the model is built.

    Attributes:
        device_type: "cpu" or "cuda", where the model will run.
        bias: whether the method has a distance bias.
        dropout: the attention dropout in training.
    """

    device_type: str
    bias: bool
    dropout: float


class Backend(Protocol):
    """Computes attention from its inputs."""

    def supports(self, needs: Needs) -> str | None:
        """None, or the reason why a model with these needs cannot be served."""
        ...

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Causal attention [batch, heads, query_length, head_dim] in the query's dtype."""
        ...
