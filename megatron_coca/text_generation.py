"""Generation of text: prompts and continuations as strings, stop strings, and text as it grows."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.load import Overrides
from megatron_coca.console import Progress
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.data.tokenizers.chat import Messages
from megatron_coca.model import (
    GPT,
    GREEDY,
    Sampling,
    equal_length_batches,
    generate_tokens,
    keep_freed_memory,
    row_seeds,
)

logger = logging.getLogger(__name__)

CONTEXT = 5
"""Tokens of the prompt that are decoded with the first new ones: tokenizers drop the space at the start of a text."""
INCOMPLETE = "\ufffd"
"""What bytes are decoded to that are no character, or not yet."""


class Continuation:
    """The text of generated tokens, in pieces that end between characters and before what may become a stop string.

    Attributes:
        text: the pieces so far; without the stop string that ended it and what follows that.
        tokens: all generated tokens.
        finish: "eod" after the end-of-document token or one of `ends`, "stop" after a stop string, else "length".
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = (), ends: Sequence[int] = ()
    ) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text before its first token; leave it out")
        self._tokenizer, self._stops, self._ends = tokenizer, stops, (tokenizer.eod, *ends)
        # The tokens of the last piece, `_known` of them, then those that gave no text yet.
        self._ids = list(prompt[-CONTEXT:])
        self._known, self._before = len(self._ids), len(tokenizer.decode(self._ids))
        self._held = ""
        self.text = ""
        self.tokens: list[int] = []
        self.finish: Literal["eod", "stop", "length"] = "length"

    def push(self, token: int) -> str:
        """Add a token; returns the next piece of text, which may be empty."""
        self.tokens.append(token)
        if token in self._ends:
            self.finish = "eod"
            return self.flush()
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if len(text) <= self._before or text.endswith(INCOMPLETE):
            return ""
        new, self._ids = text[self._before :], self._ids[self._known :]
        self._known, self._before = len(self._ids), len(self._tokenizer.decode(self._ids))
        return self._pass_on(new, last=False)

    def flush(self) -> str:
        """The text that was held back; call it after the last token."""
        rest, self._ids = self._tokenizer.decode(self._ids)[self._before :], []
        return self._pass_on(rest, last=True)

    def _pass_on(self, new: str, last: bool) -> str:
        text = self._held + new
        found = [begin for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self.finish = "stop"
        begun = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        end = min(found) if found else len(text) - (0 if last else max(begun, default=0))
        self._held = "" if found else text[end:]
        self.text += text[:end]
        return text[:end]


@dataclass(frozen=True)
class TextGenerator:
    """A model in evaluation mode with its tokenizer; made by `load_generator`.

    Further options of the methods are those of `generate_tokens`: `use_cache` and `dynamic_length`. Prompts get `start`
    in front, if there is one; without it an empty prompt is the end-of-document token.
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
        *,
        tokens_per_batch: int = 16384,
        progress: bool = False,
        **options: Any,
    ) -> list[Continuation]:
        """Continue prompts, in batches of equal lengths of at most `tokens_per_batch` tokens (one prompt at least).

        The draws for a prompt follow from `sampling.seed`, its tokens and the number of equal prompts before it, not
        from its batch; `generate_tokens` describes the rest. Raises as it does; DataError for a prompt that cannot be
        encoded.
        """
        ids = [self._encode(prompt) for prompt in prompts]
        seeds, continuations = row_seeds(ids, sampling.seed), [Continuation(self.tokenizer, row, stops) for row in ids]
        with Progress("generating", len(ids), "prompts", show=progress) as bar:
            for batch in equal_length_batches([len(row) for row in ids], max_new_tokens, tokens_per_batch):
                rows, own_seeds = [ids[index] for index in batch], [seeds[index] for index in batch]
                steps = self._tokens(rows, max_new_tokens, sampling=sampling, seeds=own_seeds, **options)
                for _ in texts([continuations[index] for index in batch], steps):
                    pass
                bar.advance(len(batch))
        return continuations

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        **options: Any,
    ) -> Iterator[str]:
        """Yield the text that `complete` would return for this prompt alone, piece by piece."""
        ids = self._encode(prompt)
        continuation = Continuation(self.tokenizer, ids, stops)
        steps = self._tokens([ids], max_new_tokens, sampling=sampling, **options)
        yield from filter(None, (piece for (piece,) in texts([continuation], steps)))

    def answer(
        self,
        messages: Messages,
        max_new_tokens: int = 64,
        sampling: Sampling = GREEDY,
        stops: Sequence[str] = (),
        **options: Any,
    ) -> Iterator[str]:
        """Yield the next answer of a chat, piece by piece, to the end of the turn in the tokenizer's chat template.

        Raises as `generate_tokens`; DataError without a template, and for messages that it refuses.
        """
        template = self.tokenizer.chat
        if template is None:
            raise DataError("the tokenizer has no chat template; prepare the training data with one, or continue text")
        ids, end = self.tokenizer.encode_rendered(template.render(messages, prompt=True))[0], template.end_of_turn()
        # A special token ends the turn by its id, as it is not in the text; other tokens by their text.
        closing = self.tokenizer.encode_rendered(end)[0][:1]
        ends = closing if not self.tokenizer.decode(closing) else []
        text = [end.strip() or end] if end and not ends else []
        continuation = Continuation(self.tokenizer, ids, [*stops, *text], ends)
        steps = self._tokens([ids], max_new_tokens, sampling=sampling, **options)
        yield from filter(None, (piece for (piece,) in texts([continuation], steps)))

    def _encode(self, prompt: str) -> list[int]:
        start = [] if self.start is None else [self.start]
        return [*start, *self.tokenizer.encode(prompt)] or [self.tokenizer.eod]

    def _tokens(self, rows: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        prompts = torch.tensor(rows, device=next(self.model.parameters()).device)
        known = min(self.model.vocab_size, self.tokenizer.vocab_size)  # other rows of the embedding are padding
        return generate_tokens(self.model, prompts, max_new_tokens, vocab_size=known, **options)


def texts(rows: Sequence[Continuation], steps: Iterator[Tensor]) -> Iterator[list[str]]:
    """Yield the new text of every row after each step, until the steps or all rows end."""
    for new in steps:
        tokens = zip(rows, new.tolist(), strict=True)
        yield [row.push(token) if row.finish == "length" else "" for row, token in tokens]
        if all(row.finish != "length" for row in rows):
            return
    yield [row.flush() if row.finish == "length" else "" for row in rows]


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
    opened = open_checkpoint(path)
    tokenizer, note = opened.tokenizer(overrides, files)
    if tokenizer is None:
        raise CheckpointError(f"{path}: {note}; prompts are text: set tokenizer_type and vocab_file to the model's")
    if note is not None:
        logger.warning("%s", note)
    start = tokenizer.token(start_token) if start_token is not None else None
    if device == "cpu":
        keep_freed_memory()
    return TextGenerator(opened.load(overrides, files, device, dtype).model, tokenizer, start)
