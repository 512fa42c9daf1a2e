"""Generate token ids for a batch of prompts of equal length, greedily or by sampling."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_coca.model.gpt import GPT

NOT_GENERATED = -1
"""Fills a row after its last token."""

DynamicLength = Literal["current", "prompt", "total"]
"""The length for length-dependent extensions during generation; a key of `DYNAMIC_LENGTHS`."""

DYNAMIC_LENGTH: DynamicLength = "current"
"""The default in generation and evaluation. Exported models have only this one, because transformers does not tell a
model the final length.
"""

DYNAMIC_LENGTHS: dict[str, Callable[[int, int], int | None]] = {
    "current": lambda prompt, new: None,
    "prompt": lambda prompt, new: prompt,
    "total": lambda prompt, new: prompt + new,
}
"""(prompt length, number of new tokens) -> length in tokens; None: the current number of tokens."""

Finished = Callable[[list[int]], bool]
"""Called after each token with all generated tokens of a row. True ends the row."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits, in the order and with the definitions of transformers' processors.

    Attributes:
        temperature: divisor of the logits; 0 takes the largest logit, and top_k, top_p and seed have no effect.
        top_k: keep the k largest logits and those equal to the smallest of them; 0 keeps all.
        top_p: keep the likeliest tokens, at least one, until their probabilities reach this sum; 1 keeps all (Holtzman
            et al. 2020).
        repetition_penalty: divisor of the positive and factor of the negative logits of the tokens in prompt and
            continuation (Keskar et al. 2019); 1 changes nothing.
        seed: at least 0.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        valid = {
            "temperature": self.temperature == 0 or 1e-30 <= self.temperature < float("inf"),
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "repetition_penalty": 1e-20 <= self.repetition_penalty <= 1e20,
            "seed": self.seed >= 0,
        }
        for name in (name for name, holds in valid.items() if not holds):
            raise ValueError(
                f"{name}: {getattr(self, name)} is out of range; temperature is 0 or at least 1e-30, top_k and "
                "seed are at least 0, top_p is above 0 and at most 1, repetition_penalty is between 1e-20 and "
                "1e20"
            )

    def filtered(self, logits: Tensor) -> Tensor:
        """Map logits [batch, vocabulary] to scores of the same shape in float32 or better: distances to the largest
        logit, divided by the temperature; -inf for tokens that are left out.
        """
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = (scores - scores.amax(dim=-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        if self.top_p < 1:
            largest, order = scores.sort(descending=True)
            probabilities = largest.softmax(dim=-1)
            before = probabilities.cumsum(dim=-1) - probabilities
            left_out = before >= self.top_p
            left_out[:, 0] = False
            scores = scores.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
        return scores


GREEDY = Sampling()


@torch.inference_mode()
def generate_tokens(
    model: GPT,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    vocab_size: int | None = None,
    dynamic_length: DynamicLength = DYNAMIC_LENGTH,
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 [batch] on the host, `max_new_tokens` times. Each step waits for the
    device once.

    Prompts have equal lengths and no padding, because some position methods are not shift-invariant. Length-dependent
    methods use the length that `dynamic_length` selects. With "prompt" or "total" the tokens are those of full passes
    without a cache. With "current" the frequencies change at each step: keys in the cache are rotated again, hidden
    states of earlier tokens stay. LongRoPE changes its frequencies once, and then all tokens are computed again, as in
    Phi 3's class in transformers. So its tokens are also those of full passes.

    The random numbers of a row depend only on its seed, so a sample does not depend on the other rows, except that
    rounding depends on the size of the batch: a draw at the border of two tokens may give either.

    Args:
        model: a model in evaluation mode.
        prompts: int64 [batch, length], both at least 1; so is `max_new_tokens`.
        sampling: by default the token with the largest logit is taken.
        seeds: seeds of the rows; by default those of `row_seeds`.
        vocab_size: ids from this one on are never generated; by default these are the ids that pad the model's
            vocabulary.
        dynamic_length: a key of `DYNAMIC_LENGTHS`.

    Raises:
        ValueError: an invalid argument, or a model in training mode.
        FloatingPointError: logits are NaN: the computation overflowed its dtype.
    """
    _check(model, prompts, max_new_tokens, dynamic_length)
    limit = vocab_size or model._config.vocab_size
    length = DYNAMIC_LENGTHS[dynamic_length](prompts.shape[1], max_new_tokens)
    new_cache = partial(model.new_cache, length=length, capacity=prompts.shape[1] + max_new_tokens)
    uniforms = seen = None
    if sampling.temperature > 0:
        uniforms = uniform_draws(seeds or row_seeds(prompts.tolist(), sampling.seed), max_new_tokens).to(prompts.device)
    cache, new, text = new_cache(), prompts, [prompts]
    for step in range(max_new_tokens):
        if model.outgrown(cache, new.shape[1]):
            cache, new = new_cache(), torch.cat(text, dim=1)
        logits = model.logits(model.hidden_states(new, cache=cache, last=1)[:, -1])
        finite = logits[:, :limit].amax(dim=-1, keepdim=True) < torch.inf  # False for NaN
        if sampling.repetition_penalty != 1:
            seen = (torch.zeros_like(logits, dtype=torch.bool) if seen is None else seen).scatter(1, new, True)
            logits = penalized(logits, seen, sampling.repetition_penalty)
        logits = logits[:, :limit]
        if uniforms is None:
            new = logits.argmax(dim=-1, keepdim=True)
        else:
            new = draw(sampling.filtered(logits), uniforms[:, step])
        text.append(new)
        yield _on_host(new, finite, logits.dtype)


def _on_host(new: Tensor, finite: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the tokens `new`, int64 [batch, 1], to the host as [batch]. Raises FloatingPointError unless all are
    `finite`.
    """
    host, whole = torch.cat((new, finite.to(new.dtype)), dim=1).to("cpu").unbind(1)
    if not whole.all():
        raise FloatingPointError(
            f"logits: infinite or NaN for a generated token, because {dtype} overflowed or the weights are "
            "not finite; use float32 or bfloat16"
        )
    return host


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    finished: Finished | None = None,
    vocab_size: int | None = None,
    dynamic_length: DynamicLength = DYNAMIC_LENGTH,
) -> Tensor:
    """Generate continuations of `prompts`, int64 [batch, max_new_tokens], on their device; see `generate_tokens`.

    `finished` ends a row early and fills it with `NOT_GENERATED`. By default no row ends early.
    """
    steps = generate_tokens(
        model,
        prompts,
        max_new_tokens,
        sampling=sampling,
        vocab_size=vocab_size,
        dynamic_length=dynamic_length,
    )
    answers = torch.full((len(prompts), max(max_new_tokens, 0)), NOT_GENERATED)
    generated: list[list[int]] = [[] for _ in prompts]
    active = [True] * len(prompts)
    for step, new in enumerate(steps):
        answers[:, step] = torch.where(torch.tensor(active), new, NOT_GENERATED)
        for row, token in enumerate(new.tolist()):
            if finished is not None and active[row]:
                generated[row].append(token)
                active[row] = not finished(generated[row])
        if not any(active):
            break
    return answers.to(prompts.device)


def row_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Derive a seed for each prompt from `seed`, its tokens, and the number of equal prompts before it."""
    seeds, copies = [], Counter[tuple[int, ...]]()
    for prompt in map(tuple, prompts):
        digest = hashlib.sha256(repr((seed, prompt, copies[prompt])).encode()).digest()
        seeds.append(int.from_bytes(digest[:8], "little"))
        copies[prompt] += 1
    return seeds


def uniform_draws(seeds: Sequence[int], count: int) -> Tensor:
    """Draw float64 [rows, count] in [0, 1). The numbers of a row depend on its seed, and the n-th does not depend on
    `count`. They are drawn on the CPU, so that they are the same on every device.
    """
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows).clamp_(max=1 - 2**-40)  # keeps the product with a sum of probabilities below that sum


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Reduce the logits [batch, vocabulary] of the tokens in `seen`, bool of the same shape, in float32 or better."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens, int64 [batch, 1], from the softmax of `scores` [batch, vocabulary]: the first token at which the
    cumulative probability exceeds `uniform`, float64 [batch].
    """
    cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)


def equal_length_batches(lengths: Sequence[int], max_new_tokens: int, tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield the indices of prompts of equal length, shortest first, with at most `tokens_per_batch` tokens including
    answers.
    """
    for length in sorted(set(lengths)):
        indices = [index for index, other in enumerate(lengths) if other == length]
        size = max(1, tokens_per_batch // (length + max_new_tokens))
        yield from (indices[first : first + size] for first in range(0, len(indices), size))


def _check(model: GPT, prompts: Tensor, max_new_tokens: int, dynamic_length: str) -> None:
    if model.training:
        raise ValueError("model: in training mode, so dropout would change the output; call model.eval()")
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or 0 in prompts.shape:
        raise ValueError(
            f"prompts: must be int64 [batch, length] of at least 1 x 1, not {prompts.dtype} {[*prompts.shape]}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} must be at least 1")
    if dynamic_length not in DYNAMIC_LENGTHS:
        raise ValueError(f"dynamic_length: {dynamic_length!r} is unknown; use {', '.join(DYNAMIC_LENGTHS)}")
