"""Greedy generation: at every step the token of the largest logit, for a batch of prompts of one length."""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_coca.attention.layer import Cache
from megatron_coca.model.gpt import GPT

NOT_GENERATED = -1
"""Fills a row after its last token."""

DynamicLength = Literal["current", "prompt", "total"]
"""The length for length-dependent extensions during generation; a key of `DYNAMIC_LENGTHS`."""

DYNAMIC_LENGTH: DynamicLength = "current"
"""The default, here and in evaluation; the only one of exported models, because transformers does not tell a model the
final length.
"""

DYNAMIC_LENGTHS: dict[str, Callable[[int, int], int | None]] = {
    "current": lambda prompt, new: None,
    "prompt": lambda prompt, new: prompt,
    "total": lambda prompt, new: prompt + new,
}
"""(prompt length, number of new tokens) -> length in tokens; None: the current number of tokens."""

Finished = Callable[[list[int]], bool]
"""Called after each token with all generated tokens of a row; True ends the row."""


class Decoder(Protocol):
    """The methods of `GPT` that generation uses."""

    training: bool

    def new_cache(self, length: int | None = None, capacity: int | None = None) -> Cache:
        """An empty cache for `capacity` tokens; `length` as in `Cache`."""

    def hidden_states(
        self, input_ids: Tensor, *, cache: Cache | None = None, length: int | None = None, last: int | None = None
    ) -> Tensor:
        """[batch, length] int64 -> [batch, last, hidden_size] of the last tokens (None: of all); with a cache, the
        tokens follow its own.
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
    """Greedy continuations of `prompts`, int64 [batch, max_new_tokens] on their device.

    Prompts have one length and no padding, because not every position method is shift-invariant.

    For length-dependent position methods, `dynamic_length` selects the length. With "prompt" or "total" the tokens are
    the same with and without the cache. With "current" the frequencies change at each step, as in transformers: the
    cache keeps hidden states of earlier tokens computed with earlier frequencies and only rotates their keys again;
    without the cache every step computes all tokens with its own frequencies.

    Args:
        model: in evaluation mode.
        prompts: int64 [batch, length], both at least 1.
        max_new_tokens: at least 1.
        use_cache: if False, each step runs the complete sequence again.
        finished: ends a row early; the rest of it is `NOT_GENERATED`. By default no row ends.
        vocab_size: ids from here on are never generated; by default those that pad a GPT's vocabulary.
        dynamic_length: a key of `DYNAMIC_LENGTHS`.

    Raises:
        ValueError: invalid prompts, number of tokens or `dynamic_length`, or a model in training mode.
        FloatingPointError: logits are NaN: the computation overflowed its dtype.
    """
    _check(model, prompts, max_new_tokens, dynamic_length)
    limit = vocab_size or (model._config.vocab_size if isinstance(model, GPT) else None)
    length = DYNAMIC_LENGTHS[dynamic_length](prompts.shape[1], max_new_tokens)
    cache = model.new_cache(length=length, capacity=prompts.shape[1] + max_new_tokens) if use_cache else None
    answers = prompts.new_full((len(prompts), max_new_tokens), NOT_GENERATED)
    generated: list[list[int]] = [[] for _ in prompts]
    active = [True] * len(prompts)
    tokens = new = prompts
    for step in range(max_new_tokens):
        if cache is not None:
            hidden = model.hidden_states(new, cache=cache, last=1)
        else:
            hidden = model.hidden_states(tokens, length=length, last=1)
        new = _largest(model.logits(hidden[:, -1]), limit)
        answers[:, step] = torch.where(torch.tensor(active, device=new.device), new[:, 0], NOT_GENERATED)
        if cache is None:
            tokens = torch.cat((tokens, new), dim=1)
        if finished is None:  # no row can end, so nothing is copied from the device
            continue
        for row, token in enumerate(new[:, 0].tolist()):
            if active[row]:
                generated[row].append(token)
                active[row] = not finished(generated[row])
        if not any(active):
            break
    return answers


def _largest(logits: Tensor, limit: int | None) -> Tensor:
    """[batch, padded vocabulary] -> int64 [batch, 1]: argmax of the first `limit` logits (None: of all)."""
    best, new = logits[:, :limit].max(dim=-1, keepdim=True)
    if best.isnan().any():
        raise FloatingPointError(
            f"the logits of a generated token are NaN: {logits.dtype} overflowed, or the weights are not "
            "finite; use float32 or bfloat16"
        )
    return new


def _check(model: GPT | Decoder, prompts: Tensor, max_new_tokens: int, dynamic_length: str) -> None:
    if model.training:
        raise ValueError("the model is in training mode, dropout would change what it generates: call model.eval()")
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or 0 in prompts.shape:
        raise ValueError(f"prompts are int64 [batch, length] of at least 1 x 1, not {prompts.dtype} {[*prompts.shape]}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens {max_new_tokens}: must be at least 1")
    if dynamic_length not in DYNAMIC_LENGTHS:
        raise ValueError(f"dynamic_length {dynamic_length!r} is not known; known: {', '.join(DYNAMIC_LENGTHS)}")
