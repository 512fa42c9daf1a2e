"""One of our models as a model of lm-evaluation-harness 0.4.13. Importing this needs lm_eval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.model import DYNAMIC_LENGTH, GPT, NOT_GENERATED, DynamicLength, generate

DEFAULT_NEW_TOKENS = 256
"""The harness's own, where a task names none."""

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks give the largest number of new tokens, in the harness's order of preference."""

NO_EFFECT = frozenset({"until", "do_sample", "temperature", "top_p", "top_k", "min_p", "use_cache", *LENGTH_NAMES})
"""Settings that greedy decoding reads, or that say nothing to it."""

NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}
"""Settings that are greedy decoding with this value."""


@dataclass(frozen=True)
class Ending:
    """Where a continuation ends at the latest, and the strings before which it ends; neither is part of it."""

    new_tokens: int
    stops: tuple[str, ...]

    @classmethod
    def read(cls, task: str, settings: Mapping[str, Any]) -> "Ending":
        """From a task's `generation_kwargs`. Raises EvaluationError for what is not greedy decoding."""
        other = [name for name, value in settings.items() if name not in NO_EFFECT and value != NEUTRAL.get(name)]
        other = sorted(name for name in other if settings[name] is not None) + _sampling(settings)
        if other:
            raise EvaluationError(
                f"task {task}: generation_kwargs ask for {', '.join(other)}, and only greedy decoding is done here; "
                "take it out of the task's file"
            )
        lengths = [settings[name] for name in LENGTH_NAMES if settings.get(name) is not None]
        until = settings.get("until") or ()
        stops = (until,) if isinstance(until, str) else tuple(until)
        return cls(int(lengths[0]) if lengths else DEFAULT_NEW_TOKENS, tuple(filter(None, stops)))


def _sampling(settings: Mapping[str, Any]) -> list[str]:
    """The settings that ask for sampling. The harness reads a temperature only where `do_sample` is not False."""
    if settings.get("do_sample") is False:
        return []
    return [name for name in ("do_sample", "temperature") if float(settings.get(name) or 0.0) > 0.0]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and when to stop."""

    ids: tuple[int, ...]
    ending: Ending


def continuations(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    tokens_per_batch: int,
    vocab_size: int,
    dynamic_length: DynamicLength = DYNAMIC_LENGTH,
) -> list[str]:
    """The text that follows each prompt, in their order; the texts do not depend on it.

    A batch has prompts of one length and one ending, because not every position method allows padding on the left.
    """
    found: dict[Prompt, str] = {}
    groups: dict[tuple[int, Ending], list[Prompt]] = {}
    for each in sorted(set(prompts), key=lambda prompt: (-len(prompt.ids), prompt.ids, prompt.ending.stops)):
        groups.setdefault((len(each.ids), each.ending), []).append(each)
    for (length, ending), group in groups.items():
        size = max(1, tokens_per_batch // (length + ending.new_tokens))
        for first in range(0, len(group), size):
            batch = group[first : first + size]
            texts = _continue(model, tokenizer, batch, ending, vocab_size, dynamic_length)
            found |= zip(batch, texts, strict=True)
    return [found[each] for each in prompts]


def _continue(
    model: GPT,
    tokenizer: Tokenizer,
    batch: Sequence[Prompt],
    ending: Ending,
    vocab_size: int,
    dynamic_length: DynamicLength,
) -> list[str]:
    window = max((len(stop.encode()) for stop in ending.stops), default=0) + 4

    def finished(generated: list[int]) -> bool:
        # A token is at least a byte of text, so that the last tokens hold any stop string that ends just now.
        tail = tokenizer.decode(generated[-window:])
        return generated[-1] == tokenizer.eod or any(stop in tail for stop in ending.stops)

    device = next(model.parameters()).device
    ids = torch.tensor([prompt.ids for prompt in batch], dtype=torch.int64, device=device)
    answers = generate(
        model, ids, ending.new_tokens, finished=finished, vocab_size=vocab_size, dynamic_length=dynamic_length
    )
    return [_text(tokenizer, answer, ending.stops) for answer in answers.tolist()]


def _text(tokenizer: Tokenizer, generated: list[int], stops: Sequence[str]) -> str:
    """The decoded tokens before the end of the document and before the first stop string."""
    kept = [token for token in generated if token != NOT_GENERATED]
    if tokenizer.eod in kept:
        kept = kept[: kept.index(tokenizer.eod)]
    text = tokenizer.decode(kept)
    for stop in stops:
        text = text.partition(stop)[0]
    return text


POSITIONS_PER_CHUNK = 1024
"""Positions whose logits are held at a time."""


class Likelihood(NamedTuple):
    """Sum of the log-probabilities of a continuation in nats, and whether greedy decoding would give just it."""

    total: float
    greedy: bool


@dataclass(frozen=True)
class Scoring:
    """The last `count` tokens of `tokens` are scored, each from all tokens before it."""

    tokens: tuple[int, ...]
    count: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads."""
        return self.tokens[:-1]


@torch.inference_mode()
def likelihoods(
    model: GPT, scorings: Sequence[Scoring], tokens_per_batch: int, vocab_size: int | None = None
) -> list[Likelihood]:
    """One for each of `scorings`, in their order; the numbers do not depend on it.

    Shorter inputs are padded on the right, where a causal model does not look. Where frequencies depend on the length
    of the input, only inputs that see the same ones share a batch. The softmax is over the vocabulary with its padding rows, in
    float32; the sum over tokens in float64. Greedy decoding never chooses ids from `vocab_size` on (None: any).
    """
    found: dict[Scoring, Likelihood] = {}
    by_input: dict[tuple[int, ...], list[Scoring]] = {}
    for each in sorted(set(scorings), key=lambda scoring: (scoring.tokens, scoring.count)):
        by_input.setdefault(each.inputs, []).append(each)
    for batch in _batches(model, list(by_input), tokens_per_batch):
        hidden = _hidden(model, batch)
        for row, inputs in enumerate(batch):
            for each in by_input[inputs]:
                found[each] = _score(model, hidden[row, len(inputs) - each.count : len(inputs)], each, vocab_size)
    return [found[each] for each in scorings]


def _batches(model: GPT, rows: list[tuple[int, ...]], limit: int) -> Iterator[list[tuple[int, ...]]]:
    """Longest first, so that what does not fit into memory fails at once; at most `limit` tokens, padding counted."""
    batch: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda tokens: (-len(tokens), tokens)):
        full = bool(batch) and len(batch[0]) * (len(batch) + 1) > limit
        if full or (batch and _length_class(model, row) != _length_class(model, batch[0])):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _length_class(model: GPT, row: tuple[int, ...]) -> int:
    """Inputs of one class see the same frequencies: any, or those within L of the extension and then each length."""
    rotary = model.method.rotary
    dependent = rotary is not None and (model.method.clex is not None or rotary.depends_on_length)
    return max(len(row), rotary.original_length) if rotary is not None and dependent else 0


def _hidden(model: GPT, batch: list[tuple[int, ...]]) -> Tensor:
    """[batch, longest, hidden_size]; what stands behind the end of a row means nothing."""
    device = next(model.parameters()).device
    padded = [[*row, *[0] * (len(batch[0]) - len(row))] for row in batch]
    return model.hidden_states(torch.tensor(padded, dtype=torch.int64, device=device))


def _score(model: GPT, hidden: Tensor, scoring: Scoring, vocab_size: int | None) -> Likelihood:
    """For hidden states [count, hidden_size] of the positions before the scored tokens."""
    targets = torch.tensor(scoring.tokens[-scoring.count :], device=hidden.device)
    total, greedy = torch.zeros((), dtype=torch.float64, device=hidden.device), True
    for states, wanted in zip(hidden.split(POSITIONS_PER_CHUNK), targets.split(POSITIONS_PER_CHUNK), strict=True):
        logs = model.logits(states).float().log_softmax(dim=-1)
        total += logs.gather(-1, wanted[:, None]).double().sum()
        greedy = greedy and bool((logs[:, :vocab_size].argmax(dim=-1) == wanted).all())
    return Likelihood(total.item(), greedy)


Encoded = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request of the harness: its texts, the context's tokens, the continuation's."""


class HarnessModel(TemplateLM):
    """Answers the harness's requests as its own HFLM does for the same weights, so that scores can be compared.

    A text without context follows the token that ends documents. What is longer than `max_length` loses its beginning.

    Args:
        model: in evaluation mode.
        tokenizer: of its checkpoint.
        max_length: tokens that the model reads at most; more than its training length is allowed.
        tokens_per_batch: of one forward pass at most, one input at least.
        vocab_size: ids from here on are padding; they are never generated, nor taken for what greedy decoding gives.
        dynamic_length: what an extension that depends on the length sees while tokens are generated.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        max_length: int,
        tokens_per_batch: int,
        vocab_size: int,
        dynamic_length: DynamicLength = DYNAMIC_LENGTH,
    ) -> None:
        super().__init__()
        self.dynamic_length = dynamic_length
        self.model, self._tokens, self.max_length = model, tokenizer, max_length
        self.tokens_per_batch, self.vocab_size = tokens_per_batch, vocab_size
        self.tokens = 0  # that were scored or generated

    @property
    def eot_token_id(self) -> int:
        """The token that ends documents."""
        return self._tokens.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids, without start or end symbols: none were there in training."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        scorings = [self._scoring(texts, context, continuation) for texts, context, continuation in requests]
        answers = likelihoods(self.model, scorings, self.tokens_per_batch, self.vocab_size)
        return [(total, greedy) for total, greedy in answers]

    def _scoring(self, texts: tuple[str, str] | None, context: list[int], continuation: list[int]) -> Scoring:
        if not 1 <= len(continuation) <= self.max_length:
            raise EvaluationError(
                f"the continuation {'of a window' if texts is None else repr(texts[1][:60])} has {len(continuation)} "
                f"tokens of its own, and 1 to {self.max_length} can be scored; correct the task, or raise --max-length"
            )
        tokens = (context or [self.prefix_token_id]) + continuation
        self.tokens += len(continuation)
        return Scoring(tuple(tokens[-(self.max_length + 1) :]), len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts in nats, over disjoint windows of `max_length`, as the harness defines it."""
        windows: list[Encoded] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = list(get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1))
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(pairs))
        answers = iter(self._loglikelihood_tokens(windows))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations. Raises EvaluationError for tasks that sample, or that leave no room for a prompt."""
        prompts = [self._prompt(str(request.task_name), *request.args) for request in requests]
        texts = continuations(
            self.model, self._tokens, prompts, self.tokens_per_batch, self.vocab_size, self.dynamic_length
        )
        self.tokens += sum(len(self._tokens.encode(text)) for text in texts)
        return texts

    def _prompt(self, task: str, context: str, settings: dict[str, Any]) -> Prompt:
        ending = Ending.read(task, settings)
        room = self.max_length - ending.new_tokens
        if room < 1:
            raise EvaluationError(
                f"task {task}: {ending.new_tokens} new tokens leave no room for a prompt in {self.max_length}; raise "
                "--max-length"
            )
        ids = self.tok_encode(context) or [self.prefix_token_id]
        return Prompt(tuple(ids[-room:]), ending)
