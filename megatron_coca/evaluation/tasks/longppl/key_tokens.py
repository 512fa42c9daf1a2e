"""Key tokens of LongPPL (Fang et al. 2024, arXiv 2410.23771): tokens that a long context makes far more likely.

A token is a key token if two conditions hold for its log-likelihood given the whole context l and given a short one s:

    log P(x | l) - log P(x | s) > alpha    (the long-short difference, LSD)
    log P(x | l) > beta                    (the long-context likelihood, LCL)

The short context has at least `short` and fewer than `short + stride` tokens, because the short contexts of `stride`
consecutive tokens begin at the same token. Positions are counted from that token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_coca.evaluation.tasks.perplexity.measure import LanguageModel, token_losses


@dataclass(frozen=True)
class ContextContrast:
    """The lengths that define the short context, in tokens, and the thresholds, in nats."""

    short: int = 4096
    stride: int = 1024
    alpha: float = 2.0
    beta: float = -2.0


@torch.inference_mode()
def losses_of(model: LanguageModel, rows: np.ndarray, last: int) -> np.ndarray:
    """Return the losses of the `last` tokens of each row, given all tokens before them in the row, in nats.

    `rows` is int64 [batch, length] with last < length; the result is float64 [batch, last].
    """
    device = next(model.parameters()).device
    ids = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    hidden = model.hidden_states(ids, last=last + 1)[:, :-1]
    losses: list[Tensor] = [
        token_losses(model, states, targets)[0] for states, targets in zip(hidden, ids[:, -last:], strict=True)
    ]
    return torch.stack(losses).double().cpu().numpy()


def window_lengths(length: int, contrast: ContextContrast) -> list[int]:
    """Return the lengths of the windows that `key_tokens` reads for a document of `length` tokens."""
    short, stride = contrast.short, contrast.stride
    return [length, *(min(length - start, short + stride) for start in range(0, length - short, stride))]


@torch.inference_mode()
def key_tokens(
    model: LanguageModel,
    tokens: np.ndarray,
    contrast: ContextContrast,
    tokens_per_batch: int = 8192,
    read: Callable[[int, int], None] = lambda windows, tokens: None,
) -> np.ndarray:
    """Return the places of a document's key tokens (int64, ascending). Tokens before `short` are never key tokens.

    A forward pass has at most `tokens_per_batch` tokens, but at least one window; the long context is one window. After
    each pass, `read` is called with its number of windows and its number of tokens.
    """
    short, stride = contrast.short, contrast.stride
    long = losses_of(model, tokens[None], len(tokens) - 1)[0]  # the loss of token i is at i - 1
    read(1, len(tokens))
    starts = list(range(0, len(tokens) - short, stride))
    whole = [start for start in starts if start + short + stride <= len(tokens)]
    size = max(1, tokens_per_batch // (short + stride))
    batches = [whole[first : first + size] for first in range(0, len(whole), size)]
    batches += [[start] for start in starts[len(whole) :]]  # the last window is shorter
    found = []
    for batch in batches:
        scored = min(stride, len(tokens) - short - batch[0])
        rows = np.stack([tokens[start : start + short + scored] for start in batch])
        for start, own in zip(batch, losses_of(model, rows, scored), strict=True):
            first = start + short
            given_all = long[first - 1 : first - 1 + scored]
            chosen = (own - given_all > contrast.alpha) & (given_all < -contrast.beta)
            found.append(first + np.flatnonzero(chosen))
        read(len(batch), rows.size)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


TokenSpan = tuple[int, int]
"""The index of the first character of a piece of text, and that of the first character after the piece."""


def merged(spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Join the spans that follow each other without a gap."""
    joined: list[TokenSpan] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def tokens_within(offsets: Sequence[TokenSpan], spans: Sequence[TokenSpan]) -> np.ndarray:
    """Return the places of the tokens that lie within one of the spans (int64). The first token is left out.

    `offsets` are the spans of the evaluated model's tokens, and `spans` those of another tokenizer's key tokens.
    Thus key tokens are translated from one tokenizer to another.
    """
    found, index = [], 0
    joined = merged(spans)
    for place, (start, end) in enumerate(offsets):
        while index < len(joined) and joined[index][1] < end:
            index += 1
        if index == len(joined):
            break
        if place and start >= joined[index][0]:
            found.append(place)
    return np.array(found, dtype=np.int64)
