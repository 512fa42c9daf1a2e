"""Generate token ids for a batch of equally long prompts, greedily or by sampling."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_coca.attention.layer import Cache
from megatron_coca.model import static_decoding
from megatron_coca.model.gpt import GPT
from megatron_coca.model.static_decoding import StaticDecoder

NOT_GENERATED = -1
"""The value that fills the rest of a row after its last generated token."""

DynamicLength = Literal["current", "prompt", "total"]
"""A key of `DYNAMIC_LENGTHS`. It selects the length that length-dependent extensions use during generation."""

DYNAMIC_LENGTH: DynamicLength = "current"
"""The default in generation and evaluation. Exported models support only this value, because transformers does not pass
the final length to a model.
"""

DYNAMIC_LENGTHS: dict[str, Callable[[int, int], int | None]] = {
    "current": lambda prompt, new: None,
    "prompt": lambda prompt, new: prompt,
    "total": lambda prompt, new: prompt + new,
}
"""Functions (prompt length, number of new tokens) -> length in tokens. None means the current number of tokens."""

Decoding = Literal["growing", "static", "auto"]
"""How tokens after the first one are decoded. "growing": the tensors of the cache have one more token after every step.
"static": every step has the same shapes, and on CUDA its operations are captured in a graph. "auto" is "static" on CUDA
if the model supports it (`static_decoding.unsupported`), and otherwise "growing". All values generate the same tokens,
up to rounding. "growing" is the default, because no graph has been compared with it on a GPU yet
(tests/gpu/test_decoding_cuda.py).
"""

DECODING: Decoding = "growing"
"""The default in generation and evaluation."""

Finished = Callable[[list[int]], bool]
"""Called after each token with all tokens generated so far for a row. Returns True to end the row."""


class DecodingError(ValueError):
    """A model does not support the chosen `Decoding`."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. The steps and their order are those of transformers' logits processors.

    Attributes:
        temperature: the logits are divided by it. With 0 the token with the largest logit is taken, and top_k, top_p
            and seed have no effect.
        top_k: keep the k largest logits, and any ties with the smallest of them; 0 keeps all logits.
        top_p: keep the most likely tokens, at least one, until their probabilities add up to this value; 1 keeps all
            tokens (Holtzman et al. 2020).
        repetition_penalty: for every token that occurs in the prompt or its continuation, a positive logit is divided
            by this value and a negative logit multiplied by it (Keskar et al. 2019); 1 changes nothing.
        seed: seed of the random draws, at least 0.

    Raises:
        ValueError: a value is outside its range.
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
                f"{name}: {getattr(self, name)} is out of range; temperature must be 0 or at least 1e-30, top_k and "
                "seed at least 0, top_p above 0 and at most 1, repetition_penalty between 1e-20 and 1e20"
            )

    def filtered(self, logits: Tensor) -> Tensor:
        """Return scores [batch, vocabulary], in float32 or better, for logits of the same shape. A score is the logit
        minus the largest logit, divided by the temperature; it is -inf for tokens that top_k or top_p excludes.
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
    cache: Cache | None = None,
    decoding: Decoding = DECODING,
) -> Iterator[Tensor]:
    """Yield the next token of every row, int64 [batch] in host memory, `max_new_tokens` times.

    The prompts must have equal lengths and no padding, because some position methods are not shift-invariant.
    Length-dependent methods use the length that `dynamic_length` selects. With "prompt" or "total", the generated
    tokens are the same as with full forward passes without a cache. With "current", the frequencies change at each
    step: the keys in the cache are rotated again, but the hidden states of earlier tokens do not change. LongRoPE
    changes its frequencies only once, and then the model processes all tokens again, as the Phi 3 class of transformers
    does. With LongRoPE, the tokens are therefore also the same as with full forward passes.

    The random numbers of a row depend only on its seed, so a sample does not depend on the other rows. There is one
    exception: rounding depends on the batch size, so a draw on the border between two tokens may select either.

    Args:
        model: a model in evaluation mode.
        prompts: int64 [batch, length], both dimensions at least 1.
        max_new_tokens: number of tokens to generate per row, at least 1.
        sampling: how tokens are chosen; by default the token with the largest logit is taken.
        seeds: one seed for each row; by default the seeds that `row_seeds` returns.
        vocab_size: ids at or above it are never generated; by default the model's vocabulary size without padding.
        dynamic_length: a key of `DYNAMIC_LENGTHS`.
        cache: a cache from `SharedPrefix` that contains the first tokens of the prompts, but not all tokens. The other
            tokens are added to it. By default, the cache is empty.
        decoding: how tokens are decoded; see `Decoding`.

    Raises:
        ValueError: an argument is invalid, or the model is in training mode.
        DecodingError: the model does not support `decoding: static`.
        FloatingPointError: a logit is infinite or NaN, because the computation overflowed its dtype or the weights are
            not finite.
    """
    _check(model, prompts, max_new_tokens, dynamic_length)
    limit = vocab_size or model._config.vocab_size
    length = DYNAMIC_LENGTHS[dynamic_length](prompts.shape[1], max_new_tokens)
    new_cache = partial(model.new_cache, length=length, capacity=prompts.shape[1] + max_new_tokens)
    uniforms = None
    if sampling.temperature > 0:
        uniforms = uniform_draws(seeds or row_seeds(prompts.tolist(), sampling.seed), max_new_tokens).to(prompts.device)
    choose = TokenChoice(sampling, limit, uniforms)
    cache = new_cache() if cache is None else cache
    new, text = prompts[:, len(cache) :], [prompts]
    decoder = None if max_new_tokens == 1 else _decoder(model, cache, prompts, max_new_tokens, choose, decoding)
    for step in range(max_new_tokens if decoder is None else 1):
        if model.outgrown(cache, new.shape[1]):
            cache, new = new_cache(), torch.cat(text, dim=1)
        logits = model.logits(model.hidden_states(new, cache=cache, last=1)[:, -1])
        new, finite = choose(logits, new, step)
        text.append(new)
        yield _on_host(torch.cat((new, finite.to(new.dtype)), dim=1).to("cpu"), logits.dtype)
    if decoder is not None:
        for found in decoder.tokens(cache, new, 1, max_new_tokens - 1):
            yield _on_host(found, logits.dtype)


class TokenChoice:
    """Chooses the next tokens from logits, without waiting for the device.

    Attributes:
        rule: a value that is equal for objects that choose the same tokens from the same logits, or None if the choice
            also depends on earlier calls or on random numbers.
    """

    def __init__(self, sampling: Sampling, limit: int | None, uniforms: Tensor | None) -> None:
        """Ids from `limit` on are never chosen. `uniforms`, float64 [batch, tokens], are random numbers in [0, 1) for
        sampling; without them, the token with the largest logit is chosen.
        """
        self._sampling, self._limit, self._uniforms = sampling, limit, uniforms
        self._seen: Tensor | None = None
        self.rule = ("largest", limit) if uniforms is None and sampling.repetition_penalty == 1 else None

    def __call__(self, logits: Tensor, ids: Tensor, number: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the next tokens, int64 [batch, 1], and whether the logits of each row are finite, bool [batch, 1].

        `ids`, int64 [batch, length], are the new input tokens, and `logits` [batch, vocabulary] are the model's output
        for the last of them. `number` is the index of the generated token, from 0, as an int or an int64 tensor [1].
        """
        finite = logits[:, : self._limit].amax(dim=-1, keepdim=True) < torch.inf  # False for NaN
        if self._sampling.repetition_penalty != 1:
            if self._seen is None:
                self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen.scatter_(1, ids, True)  # in place, because a CUDA graph keeps the address
            logits = penalized(logits, self._seen, self._sampling.repetition_penalty)
        logits = logits[:, : self._limit]
        if self._uniforms is None:
            return logits.argmax(dim=-1, keepdim=True), finite
        if isinstance(number, Tensor):
            uniform = self._uniforms.index_select(1, number)[:, 0]
        else:
            uniform = self._uniforms[:, number]
        return draw(self._sampling.filtered(logits), uniform), finite


def _decoder(
    model: GPT, cache: Cache, prompts: Tensor, max_new_tokens: int, choose: TokenChoice, decoding: Decoding
) -> StaticDecoder | None:
    """Return the decoder with fixed shapes, or None to decode with a growing cache."""
    if decoding == "growing" or (decoding == "auto" and prompts.device.type != "cuda"):
        return None
    (batch, length), decoder = prompts.shape, cache.decoder
    total = length + max_new_tokens - 1  # the last token is never an input
    if (reason := static_decoding.unsupported(model, cache, total, length)) is not None:
        if decoding == "static":
            raise DecodingError(f"decoding: static does not support this model or text ({reason}); use growing")
        return None
    if not isinstance(decoder, StaticDecoder) or not decoder.fits(model, batch, total, choose.rule, length):
        decoder = StaticDecoder(model, cache, batch, total, choose, choose.rule, length)
        cache.decoder = None if choose.rule is None else decoder
    return decoder


def _on_host(found: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tokens [batch], which are the first column of `found`, int64 [batch, 2] in host memory. The second
    column is 1 if the logits of a row are finite. Raises FloatingPointError if the logits of a row are not finite.
    """
    new, finite = found.unbind(1)
    if not finite.all():
        raise FloatingPointError(
            f"logits: infinite or NaN, because {dtype} overflowed or the weights are not finite; use float32 or "
            "bfloat16"
        )
    return new


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
    cache: Cache | None = None,
    decoding: Decoding = DECODING,
) -> Tensor:
    """Return continuations of `prompts`, int64 [batch, max_new_tokens], on the device of `prompts`; see
    `generate_tokens`.

    If `finished` ends a row early, the rest of the row is `NOT_GENERATED`. By default no row ends early.
    """
    steps = generate_tokens(
        model,
        prompts,
        max_new_tokens,
        sampling=sampling,
        vocab_size=vocab_size,
        dynamic_length=dynamic_length,
        cache=cache,
        decoding=decoding,
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


@torch.inference_mode()
def check_reach(model: GPT, length: int) -> None:
    """Raise PositionRangeError if the model cannot compute one of the positions 0 to `length` - 1."""
    last = torch.tensor([length - 1], device=next(model.parameters()).device)
    x = model.embedding(torch.zeros_like(last)[None], last, length)
    model.contexts(last, length, x.dtype, reached=length)


def row_seeds(prompts: Sequence[Sequence[int]], seed: int) -> list[int]:
    """Derive a seed for each prompt from `seed`, the prompt's tokens, and the number of identical prompts before it."""
    seeds, copies = [], Counter[tuple[int, ...]]()
    for prompt in map(tuple, prompts):
        digest = hashlib.sha256(repr((seed, prompt, copies[prompt])).encode()).digest()
        seeds.append(int.from_bytes(digest[:8], "little"))
        copies[prompt] += 1
    return seeds


def uniform_draws(seeds: Sequence[int], count: int) -> Tensor:
    """Draw uniform random numbers in [0, 1), float64 [rows, count]. The numbers of a row depend only on its seed, and a
    larger `count` does not change the first numbers. They are drawn on the CPU, so that they are the same on every
    device.
    """
    rows = [torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in seeds]
    # This limit keeps the product of a draw and the sum of the probabilities below that sum.
    return torch.stack(rows).clamp_(max=1 - 2**-40)


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return the logits [batch, vocabulary], in float32 or better, with the repetition penalty applied to the tokens
    that `seen`, bool of the same shape, selects.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens, int64 [batch, 1], from the softmax of `scores` [batch, vocabulary]. The result is the first token at
    which the cumulative probability exceeds `uniform`, float64 [batch].
    """
    cumulative = scores.double().softmax(dim=-1).cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)


def equal_length_batches(lengths: Sequence[int], max_new_tokens: int, tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield the prompt indices of each batch, shortest prompts first. All prompts of a batch have the same length. A
    batch with several prompts has at most `tokens_per_batch` tokens, including `max_new_tokens` per prompt.
    """
    for length in sorted(set(lengths)):
        indices = [index for index, other in enumerate(lengths) if other == length]
        size = max(1, tokens_per_batch // (length + max_new_tokens))
        yield from (indices[first : first + size] for first in range(0, len(indices), size))


def _check(model: GPT, prompts: Tensor, max_new_tokens: int, dynamic_length: str) -> None:
    if model.training:
        raise ValueError("model: is in training mode, in which dropout changes the output; call model.eval()")
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or 0 in prompts.shape:
        raise ValueError(
            f"prompts: must be int64 [batch, length] with at least one row and one token, not {prompts.dtype} "
            f"{[*prompts.shape]}"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: must be at least 1, not {max_new_tokens}")
    if dynamic_length not in DYNAMIC_LENGTHS:
        raise ValueError(
            f"dynamic_length: unknown value {dynamic_length!r}; supported values: {', '.join(DYNAMIC_LENGTHS)}"
        )
