"""A stand-in for a model in tests of generation."""

from types import SimpleNamespace

from torch import Tensor

from megatron_coca.attention.layer import Cache


class StandIn:
    """The interface of a model that generation uses, except `logits`. Hidden states are the ids of the tokens."""

    training = False
    _config = SimpleNamespace(vocab_size=None)

    def new_cache(self, length: int | None = None, capacity: int | None = None) -> Cache:
        return Cache([None], length, capacity)

    def outgrown(self, cache: Cache, new: int) -> bool:
        return False

    def hidden_states(
        self, input_ids: Tensor, *, cache: Cache | None = None, length: int | None = None, last: int | None = None
    ) -> Tensor:
        return (input_ids if last is None else input_ids[:, -last:])[..., None].float()
