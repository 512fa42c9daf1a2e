"""Generation of text: prompts and continuations as strings, chats, and stop strings."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.load import Overrides
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.chat import Messages
from megatron_coca.model import (
    GPT,
    GREEDY,
    Sampling,
    equal_length_batches,
    generate_tokens,
    row_seeds,
)
from megatron_coca.support.console import Progress
from megatron_coca.support.host import keep_freed_memory

logger = logging.getLogger(__name__)

CONTEXT = 5
"""Tokens of the prompt that are decoded with the new ones: tokenizers drop the space at the start of a text."""


class Continuation:
    """The text of generated tokens.

    Attributes:
        tokens: all generated tokens.
        finish: "eod" after a token that ends texts (`Tokenizer.ends`) or one of `ends`, "stop" after a stop string,
            else "length".
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text before its first token; leave it out")
        self._tokenizer, self._stops, self._ends = tokenizer, stops, (*tokenizer.ends, *ends)
        self._context = list(prompt[-CONTEXT:])
        self._before = len(tokenizer.decode(self._context))
        self.tokens: list[int] = []
        self.finish: Literal["eod", "stop", "length"] = "length"

    def push(self, token: int) -> None:
        """Add a token."""
        self.tokens.append(token)
        if token in self._ends:
            self.finish = "eod"
        elif self._stops:
            text = self._decoded()
            self.finish = "stop" if any(stop in text for stop in self._stops) else "length"

    @property
    def text(self) -> str:
        """The text so far; without the stop string that ended it and what follows that."""
        text = self._decoded()
        return text[: min((begin for stop in self._stops if (begin := text.find(stop)) >= 0), default=len(text))]

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

    def _decoded(self) -> str:
        new = self.tokens[:-1] if self.finish == "eod" else self.tokens
        return self._tokenizer.decode([*self._context, *new])[self._before :]


@dataclass(frozen=True)
class TextGenerator:
    """A model in evaluation mode with its tokenizer; made by `load_generator`.

    Names of special tokens in a prompt become these. If there is a token `start`, prompts that do not begin with it
    get it in front; without one an empty prompt is the end-of-document token.
    """

    model: GPT
    tokenizer: Tokenizer
    start: int | None = None

    def complete(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        **options: Any,
    ) -> list[Continuation]:
        """Continue prompts.

        The draws for a prompt follow from `sampling.seed`, its tokens and the number of equal prompts before it, not
        from its batch; `generate_tokens` describes the rest. Raises as it does; DataError for a prompt that cannot be
        encoded.

        Args:
            options: `tokens_per_batch`, the most tokens of a batch of prompts of one length (one prompt at least), by
                default 16384; `progress`, which shows it; `pushed`, a function that is called with a continuation after
                each of its tokens; `dynamic_length` as in `generate_tokens`.
        """
        start = [] if self.start is None else [self.start]
        encoded = [self.tokenizer.encode_prompt(prompt) for prompt in prompts]
        ids = [(row if row[:1] == start else [*start, *row]) or [self.tokenizer.eod] for row in encoded]
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
        """Continue chats by the next answer, to the end of the turn in the tokenizer's chat template.

        Otherwise as `complete`. Raises DataError too without a template, and for messages that the template rejects.
        """
        template = self.tokenizer.chat
        if template is None:
            raise DataError("the tokenizer has no chat template; prepare the training data with one, or continue text")
        ids = [self.tokenizer.encode_rendered(template.render(chat, prompt=True))[0] for chat in chats]
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
        **options: Any,
    ) -> list[Continuation]:
        seeds, device = row_seeds(ids, sampling.seed), next(self.model.parameters()).device
        options["vocab_size"] = min(self.model.vocab_size, self.tokenizer.vocab_size)  # the rest is padding
        with Progress("generating", len(ids), "prompts", show=progress) as bar:
            for batch in equal_length_batches([len(row) for row in ids], max_new_tokens, tokens_per_batch):
                prompts = torch.tensor([ids[index] for index in batch], device=device)
                own_seeds = [seeds[index] for index in batch]
                steps = generate_tokens(
                    self.model, prompts, max_new_tokens, sampling=sampling, seeds=own_seeds, **options
                )
                collect([rows[index] for index in batch], steps, pushed)
                bar.advance(len(batch))
        return rows


def collect(
    rows: Sequence[Continuation], steps: Iterator[Tensor], pushed: Callable[[Continuation], None] | None = None
) -> None:
    """Add the tokens of each step to their rows, until the steps or all rows end.

    `pushed` is called with a row after each of its tokens.
    """
    for new in steps:
        for row, token in zip(rows, new.tolist(), strict=True):
            if row.finish == "length":
                row.push(token)
                if pushed is not None:
                    pushed(row)
        if all(row.finish != "length" for row in rows):
            return


def load_generator(
    path: str | Path,
    overrides: Overrides = (),
    files: Sequence[str | Path] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    start_token: str | None = None,
) -> TextGenerator:
    """Load a checkpoint with its tokenizer; arguments as in `OpenedCheckpoint.load`.

    `start_token` is put before every prompt, such as Gemma's `<bos>`; chats have that of their template.

    Raises:
        CheckpointError: as `load_model`, and where the checkpoint has no tokenizer.
        ConfigError: an invalid override.
        DataError: the tokenizer is damaged, or has no such symbol.
    """
    opened = open_checkpoint(path, overrides=overrides, files=files)
    tokenizer, note = opened.tokenizer(overrides, files)
    if tokenizer is None:
        raise CheckpointError(f"{path}: {note}; prompts are text: set tokenizer_type and vocab_file to the model's")
    if note is not None:
        logger.warning("%s", note)
    start = tokenizer.token(start_token) if start_token is not None else None
    if device == "cpu":
        keep_freed_memory()
    return TextGenerator(opened.load(overrides, files, device, dtype).model, tokenizer, start)
