"""One of our models as a model of lm-evaluation-harness 0.4.13. Importing this needs lm_eval."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_coca.console import Progress
from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.model import DYNAMIC_LENGTH, GPT, NOT_GENERATED, DynamicLength, generate

POSITIONS_PER_CHUNK = 1024
"""Positions whose logits are in memory at a time."""

GREEDY_SETTINGS = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}
"""Generation settings that are greedy decoding with this value."""
IGNORED_SETTINGS = frozenset(
    {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p", "use_cache"}
)
"""Generation settings that are read elsewhere or do not affect greedy decoding."""

TokenizedRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request of the harness: its texts, the tokens of the context and of the continuation."""


class Scoring(NamedTuple):
    """The last `scored` tokens are scored, each from all tokens before it."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.tokens[:-1]


class Generation(NamedTuple):
    """A prompt to continue by at most `new_tokens`, ending before any of the `stops`."""

    ids: tuple[int, ...]
    new_tokens: int
    stops: tuple[str, ...]


class HarnessModel(TemplateLM):
    """Answers the harness's requests like its own HFLM for the same weights, so that scores are comparable.

    HFLM itself would give a length-dependent extension the length of the longest input of a batch, and pads prompts on
    the left, which not every position method allows.

    Every text follows the token `start`, if there is one; otherwise a text without context follows the end-of-document
    token. Inputs longer than `max_length` lose their beginning.

    `model` is in evaluation mode; `max_length` may exceed the training length; a forward pass has at most
    `tokens_per_batch` tokens, at least one input. Ids from `vocab_size` on are padding: they are never generated and
    never the greedy choice. `tokens` counts those scored or generated so far.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        max_length: int,
        tokens_per_batch: int,
        vocab_size: int,
        dynamic_length: DynamicLength = DYNAMIC_LENGTH,
        start: int | None = None,
    ) -> None:
        super().__init__()
        self.model, self.document_tokenizer, self.max_length = model, tokenizer, max_length
        self.tokens_per_batch, self.vocab_size = tokens_per_batch, vocab_size
        self.dynamic_length, self.start = dynamic_length, start
        self.model_device = next(model.parameters()).device
        self.tokens = 0

    @property
    def eot_token_id(self) -> int:
        return self.document_tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.start is None else self.start

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids without start or end symbols, as in training."""
        return self.document_tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedRequest], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation in nats, and whether greedy decoding would give it.

        No number depends on the order of the requests. Inputs are padded on the right, which a causal model ignores.
        """
        scorings = []
        for texts, context, continuation in requests:
            if not 1 <= len(continuation) <= self.max_length:
                raise EvaluationError(
                    f"the continuation {'of a window' if texts is None else repr(texts[1][:60])} has "
                    f"{len(continuation)} tokens without its context; 1 to {self.max_length} can be scored; correct "
                    "the task, or raise --max-length"
                )
            whole = texts is not None  # not a window, of which the first has the prefix
            begun = whole and self.start is not None and context[:1] != [self.start]
            tokens = ([self.prefix_token_id] if begun or not context else []) + context + continuation
            self.tokens += len(continuation)
            scorings.append(Scoring(tuple(tokens[-(self.max_length + 1) :]), len(continuation)))
        by_input: dict[tuple[int, ...], list[Scoring]] = {}
        for scoring in sorted(set(scorings)):
            by_input.setdefault(scoring.inputs, []).append(scoring)
        scores: dict[Scoring, tuple[float, bool]] = {}
        with torch.inference_mode(), Progress("scoring", len(by_input), "inputs") as progress:
            for batch in self._batches(by_input):
                progress.advance(len(batch))
                padded = [[*row, *[0] * (len(batch[0]) - len(row))] for row in batch]
                hidden = self.model.hidden_states(torch.tensor(padded, dtype=torch.int64, device=self.model_device))
                for row, inputs in enumerate(batch):
                    for scoring in by_input[inputs]:
                        states = hidden[row, len(inputs) - scoring.scored : len(inputs)]
                        scores[scoring] = self._score(states, scoring.tokens[-scoring.scored :])
        return [scores[scoring] for scoring in scorings]

    def _batches(self, inputs: Mapping[tuple[int, ...], object]) -> Iterator[list[tuple[int, ...]]]:
        """Yield the inputs longest first, so that exhausted memory shows at once; at most `tokens_per_batch` tokens
        with padding. Inputs with different frequencies of a length-dependent extension are in different batches.
        """
        rotary = [method.rotary for method in self.model.methods.values() if method.rotary is not None]
        learned = any(method.clex is not None for method in self.model.methods.values())
        lengths = [each.original_length for each in rotary if learned or each.depends_on_length]

        def frequencies(row: tuple[int, ...]) -> int:
            return max(len(row), min(lengths)) if lengths else 0

        batch: list[tuple[int, ...]] = []
        for row in sorted(inputs, key=lambda tokens: (-len(tokens), tokens)):
            full = batch and len(batch[0]) * (len(batch) + 1) > self.tokens_per_batch
            if full or (batch and frequencies(row) != frequencies(batch[0])):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _score(self, hidden: torch.Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
        """Score `tokens` from the hidden states [len(tokens), hidden_size] of the positions before them."""
        targets = torch.tensor(tokens, device=hidden.device)
        total, greedy = torch.zeros((), dtype=torch.float64, device=hidden.device), True
        for states, expected in zip(hidden.split(POSITIONS_PER_CHUNK), targets.split(POSITIONS_PER_CHUNK), strict=True):
            logs = self.model.logits(states).float().log_softmax(dim=-1)
            total += logs.gather(-1, expected[:, None]).double().sum()
            greedy = greedy and bool((logs[:, : self.vocab_size].argmax(dim=-1) == expected).all())
        return total.item(), greedy

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts in nats, over disjoint windows of `max_length` as in the harness."""
        windows: list[TokenizedRequest] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = list(get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1))
            windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return greedy continuations; no text depends on the order of the requests.

        A batch has prompts of one length and the same settings. Raises EvaluationError for tasks that sample, and if no
        room is left for a prompt.
        """
        generations = [self._generation(str(request.task_name), *request.args) for request in requests]
        groups: dict[tuple[int, int, tuple[str, ...]], list[Generation]] = {}
        for request in sorted(set(generations), key=lambda each: (-len(each.ids), each.ids, each.stops)):
            groups.setdefault((len(request.ids), request.new_tokens, request.stops), []).append(request)
        texts: dict[Generation, str] = {}
        with Progress("generating", len(set(generations)), "texts") as progress:
            for (length, new_tokens, _), group in groups.items():
                size = max(1, self.tokens_per_batch // (length + new_tokens))
                for first in range(0, len(group), size):
                    batch = group[first : first + size]
                    texts |= zip(batch, self._continue(batch), strict=True)
                    progress.advance(len(batch))
        answers = [texts[request] for request in generations]
        self.tokens += sum(len(self.tok_encode(text)) for text in answers)
        return answers

    def _generation(self, task: str, context: str, settings: Mapping[str, Any]) -> Generation:
        new_tokens, stops = greedy_limits(task, settings)
        room = self.max_length - new_tokens
        if room < 1:
            raise EvaluationError(
                f"task {task}: {new_tokens} new tokens leave no room for a prompt in {self.max_length}; raise "
                "--max-length"
            )
        ids = self.tok_encode(context)
        ids = [self.prefix_token_id, *ids] if self.start is not None or not ids else ids
        return Generation(tuple(ids[-room:]), new_tokens, stops)

    def _continue(self, batch: Sequence[Generation]) -> list[str]:
        tokenizer, stops = self.document_tokenizer, batch[0].stops
        window = max((len(stop.encode()) for stop in stops), default=0) + 4

        def finished(generated: list[int]) -> bool:
            # A token is at least a byte of text, so the last tokens contain any stop string that has just ended.
            tail = tokenizer.decode(generated[-window:])
            return generated[-1] == tokenizer.eod or any(stop in tail for stop in stops)

        answers = generate(
            self.model,
            torch.tensor([request.ids for request in batch], dtype=torch.int64, device=self.model_device),
            batch[0].new_tokens,
            finished=finished,
            vocab_size=self.vocab_size,
            dynamic_length=self.dynamic_length,
        )
        texts = []
        for answer in answers.tolist():
            kept = [token for token in answer if token != NOT_GENERATED]
            if tokenizer.eod in kept:
                kept = kept[: kept.index(tokenizer.eod)]
            texts.append(postprocess_generated_text(tokenizer.decode(kept), list(stops), None))
        return texts


def greedy_limits(task: str, settings: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the maximum number of new tokens and the stop strings of a task's `generation_kwargs`.

    Raises EvaluationError for anything but greedy decoding.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    normalized: dict[str, Any] = {**normalize_gen_kwargs(given)}
    refused = sorted(
        name
        for name, value in normalized.items()
        if name not in IGNORED_SETTINGS and value != GREEDY_SETTINGS.get(name)
    )
    if normalized["do_sample"]:
        refused += [name for name in ("do_sample", "temperature") if float(given.get(name, 0.0)) > 0.0]
    if refused:
        raise EvaluationError(
            f"task {task}: generation_kwargs ask for {', '.join(refused)}, and only greedy decoding is supported; "
            "remove it from the task's file"
        )
    return normalized["max_gen_toks"], tuple(filter(None, normalized["until"]))
