"""Greedy generation: at every step the token of the largest logit, for a batch of prompts of one length."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_coca.attention.layer import Cache
from megatron_coca.model.gpt import GPT

NOT_GENERATED = -1
"""What stands in a row behind its last token."""

DynamicLength = Literal["current", "prompt", "total"]
"""Which length an extension that depends on the length sees while tokens are generated; a key of `DYNAMIC_LENGTHS`."""

DYNAMIC_LENGTH: DynamicLength = "current"
"""The default, here and in evaluation. Exported models can do no other: transformers does not tell them how far a
generation will go.
"""

DYNAMIC_LENGTHS: dict[str, Callable[[int, int], int | None]] = {
    "current": lambda prompt, new: None,
    "prompt": lambda prompt, new: prompt,
    "total": lambda prompt, new: prompt + new,
}
"""The length in tokens by that of the prompt and the number of new tokens; None for that of the tokens so far, which
grows with every step.
"""

Finished = Callable[[list[int]], bool]
"""Asked after each token with all that a row has generated: whether the row ends with it."""


class Decoder(Protocol):
    """What is asked of a model; `GPT` has it."""

    training: bool

    def new_cache(self, length: int | None = None, capacity: int | None = None) -> Cache:
        """An empty cache with room for `capacity` tokens, at every step of which extensions see `length` (None: that of
        the tokens so far).
        """

    def hidden_states(
        self, input_ids: Tensor, *, cache: Cache | None = None, length: int | None = None, last: int | None = None
    ) -> Tensor:
        """[batch, length] int64 -> [batch, last, hidden_size] of the last so many tokens (None: of all); with a cache,
        the tokens follow its own.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., padded vocabulary]."""


@torch.inference_mode()
def generate(
    model: GPT | Decoder,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    use_cache: bool = True,
    finished: Finished | None = None,
    vocab_size: int | None = None,
    dynamic_length: DynamicLength = DYNAMIC_LENGTH,
) -> Tensor:
    """The tokens that follow `prompts` greedily, int64 [batch, max_new_tokens] on their device.

    Prompts have one length and no padding, because not every position method is invariant under a shift. Logits are
    computed of the last position alone, and rows do not look at one another.

    Where the position method depends on the length, `dynamic_length` says on which. With a fixed one, "prompt" or
    "total", the tokens are the same with the cache and without. With "current" the frequencies change from step to step,
    as with transformers: the cache keeps what the layers computed for earlier tokens with earlier frequencies, and only
    rotates their keys anew; without the cache every step computes all tokens with its own frequencies.

    Args:
        model: in evaluation mode.
        prompts: int64 [batch, length], both at least 1.
        max_new_tokens: at least 1.
        use_cache: without it each step runs the whole sequence again.
        finished: ends a row early; behind its last token it is filled with `NOT_GENERATED`. By default no row ends.
        vocab_size: ids from this one on are never generated; by default those that only pad a GPT's vocabulary.
        dynamic_length: a key of `DYNAMIC_LENGTHS`; no other methods than those that depend on the length look at it.

    Raises:
        ValueError: a prompt, a number, a name or a model in training mode that cannot be generated from.
        FloatingPointError: logits that are not numbers: the computation overflowed its dtype.
    """
    _check(model, prompts, max_new_tokens, dynamic_length)
    limit = vocab_size or _unpadded(model)
    length = DYNAMIC_LENGTHS[dynamic_length](prompts.shape[1], max_new_tokens)
    step = _WithCache(model, length, prompts.shape[1] + max_new_tokens) if use_cache else _Anew(model, length)
    answers = prompts.new_full((len(prompts), max_new_tokens), NOT_GENERATED)
    rows = _Rows(len(prompts), finished)
    new = prompts
    for number in range(max_new_tokens):
        new = _largest(step(new), limit)
        answers[:, number] = torch.where(rows.open_on(new.device), new[:, 0], NOT_GENERATED)
        if rows.add(new):
            break
    return answers


class _WithCache:
    """Logits [batch, padded vocabulary] behind the tokens of this call and of all calls before it."""

    def __init__(self, model: GPT | Decoder, length: int | None, capacity: int) -> None:
        self.model, self.cache = model, model.new_cache(length=length, capacity=capacity)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.model.logits(self.model.hidden_states(tokens, cache=self.cache, last=1)[:, -1])


class _Anew:
    """The same without keeping anything but the tokens."""

    def __init__(self, model: GPT | Decoder, length: int | None) -> None:
        self.model, self.length = model, length
        self.seen: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens)
        return self.model.logits(
            self.model.hidden_states(torch.cat(self.seen, dim=1), length=self.length, last=1)[:, -1]
        )


class _Rows:
    """Which rows still generate; nothing is asked of the device where no row can end."""

    def __init__(self, count: int, finished: Finished | None) -> None:
        self.finished, self.open = finished, [True] * count
        self.generated: list[list[int]] = [[] for _ in range(count)]

    def open_on(self, device: torch.device) -> Tensor:
        """bool [batch]."""
        return torch.tensor(self.open, device=device)

    def add(self, new: Tensor) -> bool:
        """Takes the next token of every row, int64 [batch, 1]; whether all rows have ended."""
        if self.finished is None:
            return False
        for row, token in enumerate(new[:, 0].tolist()):
            if self.open[row]:
                self.generated[row].append(token)
                self.open[row] = not self.finished(self.generated[row])
        return not any(self.open)


def _largest(logits: Tensor, limit: int | None) -> Tensor:
    """[batch, padded vocabulary] -> int64 [batch, 1]: the largest of the first `limit` (None: of all)."""
    best, new = logits[:, :limit].max(dim=-1, keepdim=True)
    if best.isnan().any():
        raise FloatingPointError(
            f"the logits of a generated token are not numbers: {logits.dtype} overflowed, or the weights are not "
            "finite; use float32 or bfloat16"
        )
    return new


def _unpadded(model: GPT | Decoder) -> int | None:
    return model._config.vocab_size if isinstance(model, GPT) else None


def _check(model: GPT | Decoder, prompts: Tensor, max_new_tokens: int, dynamic_length: str) -> None:
    if model.training:
        raise ValueError("the model is in training mode, dropout would change what it generates: call model.eval()")
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or 0 in prompts.shape:
        raise ValueError(f"prompts are int64 [batch, length] of at least 1 x 1, not {prompts.dtype} {[*prompts.shape]}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: at least 1 token is generated")
    if dynamic_length not in DYNAMIC_LENGTHS:
        raise ValueError(f"dynamic_length {dynamic_length!r} is not known; known: {', '.join(DYNAMIC_LENGTHS)}")
