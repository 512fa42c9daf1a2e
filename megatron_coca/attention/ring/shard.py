"""The shard of a rank that has some tokens of every sequence and passes its keys to the other ranks."""

from dataclasses import dataclass

from torch import Tensor

from megatron_coca.attention.context import HeadShard
from megatron_coca.attention.inputs import AttentionInputs, Backend
from megatron_coca.attention.ring.attend import ring_attend
from megatron_coca.attention.ring.exchange import Ring


@dataclass(frozen=True)
class RingShard(HeadShard):
    """A shard of the tokens, and of the heads if `count` is above 1. Without a ring, it has all tokens."""

    ring: Ring | None = None

    def split(self, tokens: Tensor) -> Tensor:
        return self.held(tokens)

    def held(self, tokens: Tensor) -> Tensor:
        ring = self.ring
        return tokens if ring is None else ring.division(tokens.shape[-1]).held(tokens, ring.rank)

    def attend(self, backend: Backend, inputs: AttentionInputs, length: int) -> Tensor:
        return backend.attend(inputs) if self.ring is None else ring_attend(backend, inputs, self.ring, length)
