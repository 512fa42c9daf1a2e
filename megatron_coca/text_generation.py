"""Generation of text: prompts and continuations as strings, chats, and stop strings."""

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.identity import network_digest
from megatron_coca.checkpoints.load import Overrides
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.chat import Messages
from megatron_coca.data.tokenizers.stops import text_before_stop
from megatron_coca.model import (
    GPT,
    GREEDY,
    Sampling,
    check_reach,
    equal_length_batches,
    generate_tokens,
    row_seeds,
)
from megatron_coca.support.console import Progress
from megatron_coca.support.host import keep_freed_memory

logger = logging.getLogger(__name__)

CONTEXT = 5
"""Number of prompt tokens that are decoded together with the new tokens, because tokenizers drop the space at the start
of a text.
"""


class Continuation:
    """The text of generated tokens.

    Attributes:
        tokens: all generated tokens.
        finish: "eod" if the last token is in `Tokenizer.ends` or in `ends`, "stop" if the text contains a stop string,
            else "length".
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text before its first token; leave it out")
        self._tokenizer, self._stops, self._ends = tokenizer, stops, (*tokenizer.ends, *ends)
        self._context = list(prompt[-CONTEXT:])
        self.tokens: list[int] = []
        self.finish: Literal["eod", "stop", "length"] = "length"

    def push(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)
        if token in self._ends:
            self.finish = "eod"
        elif self._stops:
            self.finish = "stop" if self._read()[1] else "length"

    @property
    def text(self) -> str:
        """The text so far, without the stop string that ended it and everything after this string."""
        return self._read()[0]

    @property
    def settled(self) -> str:
        """The part of the text that later tokens will not change.

        It ends before an incomplete character and before characters that may be the start of a stop string.
        """
        text = self.text
        if self.finish == "length":
            text = text.rstrip("\ufffd")
            starts = (stop[:size] for stop in self._stops for size in range(len(stop) - 1, 0, -1))
            held = max((len(start) for start in starts if text.endswith(start)), default=0)
            text = text[: len(text) - held]
        return text

    def __repr__(self) -> str:
        return f"Continuation({self.text!r}, finish={self.finish!r}, tokens={len(self.tokens)})"

    def _read(self) -> tuple[str, bool]:
        new = self.tokens[:-1] if self.finish == "eod" else self.tokens
        return text_before_stop(self._tokenizer, new, self._stops, self._context)


@dataclass(frozen=True)
class TextGenerator:
    """A model in evaluation mode with its tokenizer; made by `load_generator`.

    Names of special tokens in a prompt are encoded as these tokens. If there is a token `start`, it is put before
    prompts that do not begin with it. Without `start`, an empty prompt is encoded as the end-of-document token.
    `identify` returns a digest of the weights and of the configuration keys that change the model's output.
    """

    model: GPT
    tokenizer: Tokenizer
    start: int | None = None
    identify: Callable[[], str] = field(default=str, repr=False, compare=False)

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt for `complete`. Raises DataError for a prompt that cannot be encoded."""
        start, ids = [] if self.start is None else [self.start], self.tokenizer.encode_prompt(prompt)
        return (ids if ids[:1] == start else [*start, *ids]) or [self.tokenizer.eod]

    def encode_chat(self, chat: Messages) -> list[int]:
        """Return the tokens of a chat for `answer`, up to the beginning of the answer.

        Raises DataError if the tokenizer has no chat template or if the template rejects the messages.
        """
        template = self.tokenizer.chat
        if template is None:
            raise DataError("the tokenizer has no chat template; prepare the training data with one, or continue text")
        return self.tokenizer.encode_rendered(template.render(chat, prompt=True))[0]

    def check_room(self, tokens: int, max_new_tokens: int) -> None:
        """Raise PositionRangeError if the model has too few positions for a prompt of `tokens` tokens and its
        continuation.
        """
        check_reach(self.model, tokens + max_new_tokens - 1)  # the model does not read the last token

    def complete(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        **options: Any,
    ) -> list[Continuation]:
        """Continue prompts.

        The random numbers for a prompt depend on `sampling.seed`, the prompt's tokens and the number of equal prompts
        before it, but not on its batch. `generate_tokens` describes everything else. Raises the errors of
        `generate_tokens`, and DataError for a prompt that cannot be encoded.

        Args:
            options: `tokens_per_batch`, the maximum number of tokens of a batch, by default 16384; `progress`, whether
                to show the progress; `pushed`, a function that is called with a continuation after each of its tokens;
                `ended`, a function that is called with the index of a prompt and its continuation when the continuation
                is complete; `left_out`, indices of prompts to leave out, which keep empty continuations;
                `dynamic_length`, the argument of `generate_tokens`. A batch has at least one prompt, and all its
                prompts have the same length.
        """
        ids = [self.encode(prompt) for prompt in prompts]
        rows = [Continuation(self.tokenizer, row, stops) for row in ids]
        return self._continue(ids, rows, max_new_tokens, sampling, **options)

    def answer(
        self,
        chats: Sequence[Messages],
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        **options: Any,
    ) -> list[Continuation]:
        """Continue each chat by its next answer, up to the end of the turn in the tokenizer's chat template.

        Arguments and errors are those of `complete`. Raises DataError as `encode_chat` does.
        """
        ids = [self.encode_chat(chat) for chat in chats]
        ends, text = self.tokenizer.turn_ends()
        rows = [Continuation(self.tokenizer, row, [*stops, *text], ends) for row in ids]
        return self._continue(ids, rows, max_new_tokens, sampling, **options)

    def _continue(
        self,
        ids: Sequence[Sequence[int]],
        rows: list[Continuation],
        max_new_tokens: int,
        sampling: Sampling,
        tokens_per_batch: int = 16384,
        progress: bool = False,
        pushed: Callable[[Continuation], None] | None = None,
        ended: Callable[[int, Continuation], None] | None = None,
        left_out: Collection[int] = (),
        **options: Any,
    ) -> list[Continuation]:
        seeds, device = row_seeds(ids, sampling.seed), next(self.model.parameters()).device
        options["vocab_size"] = min(self.model.vocab_size, self.tokenizer.vocab_size)  # the rest is padding
        asked = [index for index in range(len(ids)) if index not in left_out]
        if asked:
            self.check_room(max(len(ids[index]) for index in asked), max_new_tokens)
        batches = equal_length_batches([len(ids[index]) for index in asked], max_new_tokens, tokens_per_batch)
        with Progress("generating", len(ids), "prompts", len(ids) - len(asked), show=progress) as bar:
            for batch in ([asked[place] for place in places] for places in batches):
                prompts = torch.tensor([ids[index] for index in batch], device=device)
                own_seeds = [seeds[index] for index in batch]
                steps = generate_tokens(
                    self.model, prompts, max_new_tokens, sampling=sampling, seeds=own_seeds, **options
                )
                collect({index: rows[index] for index in batch}, steps, pushed, ended)
                bar.advance(len(batch))
        return rows


def collect(
    rows: Mapping[int, Continuation],
    steps: Iterator[Tensor],
    pushed: Callable[[Continuation], None] | None = None,
    ended: Callable[[int, Continuation], None] | None = None,
) -> None:
    """Add the tokens of each step to their rows, until the steps or all rows end.

    `pushed` is called with a row after each of its tokens. `ended` is called with the key of a row and the row when the
    row is complete.
    """
    left = dict(rows)
    for new in steps:
        for (key, row), token in zip(rows.items(), new.tolist(), strict=True):
            if key not in left:
                continue
            row.push(token)
            if pushed is not None:
                pushed(row)
            if row.finish != "length":
                del left[key]
                if ended is not None:
                    ended(key, row)
        if not left:
            return
    if ended is not None:
        for key, row in left.items():
            ended(key, row)


def load_generator(
    path: str | Path,
    overrides: Overrides = (),
    files: Sequence[str | Path] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    start_token: str | None = None,
    show: bool = False,
) -> TextGenerator:
    """Load a checkpoint with its tokenizer. The other arguments are those of `OpenedCheckpoint.load`.

    `start_token`, such as Gemma's `<bos>`, is put before every prompt. In a chat, the template adds the start token.

    Raises:
        CheckpointError: `load_model` would raise it, or the checkpoint has no tokenizer.
        ConfigError: an invalid override.
        DataError: the tokenizer is damaged, or has no token `start_token`.
    """
    opened = open_checkpoint(path, overrides=overrides, files=files)
    tokenizer, note = opened.tokenizer(overrides, files)
    if tokenizer is None:
        raise CheckpointError(
            f"{path}: {note}, but prompts are text; set tokenizer_type and vocab_file to those of the model's tokenizer"
        )
    if note is not None:
        logger.warning("%s", note)
    start = tokenizer.token(start_token) if start_token is not None else None
    if device == "cpu":
        keep_freed_memory()
    loaded = opened.load(overrides, files, device, dtype, show)

    def identify() -> str:
        return hashlib.sha256(f"{loaded.identity} {network_digest(loaded.config)}".encode()).hexdigest()

    return TextGenerator(loaded.model, tokenizer, start, identify)
