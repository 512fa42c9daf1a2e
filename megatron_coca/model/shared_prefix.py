"""Process prompts that begin with the same tokens: the keys and values of the common beginning are computed once.

The results differ from those of separate prompts only by rounding, because the remaining tokens go through the same
formulas in smaller matrix products.
"""

import numpy as np

from megatron_coca.attention.layer import Cache
from megatron_coca.model.gpt import GPT


class SharedPrefix:
    """Keeps the cache of the previous prompt. The next prompt reuses the cached tokens with which both prompts begin.

    With length-dependent extensions, the rotation of the first tokens depends on the length of the whole prompt.
    Therefore only prompts with the same number of tokens share cached tokens.
    """

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._prompt: np.ndarray | None = None
        self._cache: Cache | None = None
        methods = model.methods.values()
        # A window drops tokens that a shortened cache needs. LongRoPE may have started again with a new cache.
        self._supported = all(method.window is None and method.switch is None for method in methods)

    def cache_for(self, prompt: np.ndarray, new_tokens: int, length: int | None = None) -> Cache:
        """Return a cache with the tokens with which `prompt`, integers [tokens], and the previous prompt begin. It
        never contains the last token of `prompt`. It has memory for the whole prompt and `new_tokens` more tokens.
        `length` has the same meaning as in `Cache`.
        """
        last, cache = self._prompt, self._cache
        self._prompt, self._cache = None, None  # an interrupted computation leaves no cache behind
        if cache is not None and last is not None and len(last) == len(prompt) and cache.length == length:
            cache.cut(min(common_prefix(last, prompt), len(prompt) - 1))
        else:
            cache = self._model.new_cache(length=length, capacity=len(prompt) + new_tokens)
        return cache

    def keep(self, prompt: np.ndarray, cache: Cache) -> None:
        """Keep the cache, which begins with all tokens of `prompt`, for the next prompt."""
        if self._supported:
            self._prompt, self._cache = prompt, cache


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens with which both arrays begin."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


def prefix_order(prompt: np.ndarray) -> tuple[int, list[int]]:
    """Return a sort key for prompts: length, then tokens. In this order, each prompt shares as many first tokens as
    possible with the prompt before it.

    Prompts that hide a fact in the same filler are thus ordered by the depth of the fact.
    """
    return len(prompt), prompt.tolist()
