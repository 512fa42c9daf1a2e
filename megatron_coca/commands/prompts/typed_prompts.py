"""Prompts typed at a terminal. Every line is a prompt. Its continuation appears token by token. Ctrl-D ends."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.data.errors import DataError
from megatron_coca.evaluation.results import EvaluationError, out_of_memory
from megatron_coca.model import DecodingError, Sampling
from megatron_coca.support.plain_text import plain
from megatron_coca.text_generation import Continuation, TextGenerator

ChatMessage = dict[str, str]

SIGN = "> "
WAITING = "Type a prompt and press Enter. Ctrl-C stops the current continuation; Ctrl-D quits."
WAITING_IN_CHAT = "Type a message and press Enter. Ctrl-C stops the current answer; Ctrl-D quits."


def answer_typed(generator: TextGenerator, args: Namespace, sampling: Sampling, options: dict[str, Any]) -> None:
    """Continue every typed prompt, or with `--chat` answer every message of one conversation, until Ctrl-D.

    A prompt that is typed again is sampled with the next seed. If a prompt or message cannot be continued, an error
    message says so, and the user can type the next one. Raises EvaluationError if there is no chat template.
    """
    if args.chat and generator.tokenizer.chat is None:
        raise EvaluationError("--chat: the tokenizer has no chat template; leave out --chat")
    print(WAITING_IN_CHAT if args.chat else WAITING, file=sys.stderr, flush=True)
    opening = [] if args.system is None else [{"role": "system", "content": args.system}]
    chat: list[ChatMessage] = []
    times = Counter[str]()
    for text in typed_lines():
        own = replace(sampling, seed=sampling.seed + (0 if args.chat else times[text]))
        times[text] += 1
        printer = Printer()
        try:
            if args.chat:
                asked = fitting(
                    generator, opening, [*chat, {"role": "user", "content": text}], options["max_new_tokens"]
                )
                generator.answer([[*opening, *asked]], sampling=own, pushed=printer.show, **options)
            else:
                generator.complete([text], sampling=own, pushed=printer.show, **options)
        except KeyboardInterrupt:
            printer.interrupted = True
        except (DataError, PositionRangeError, DecodingError, FloatingPointError) as error:
            printer.break_line()
            tell(str(error))
            continue
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            printer.break_line()
            tell("out of memory; type a shorter text, or begin again with a lower --max-new-tokens")
            continue
        answer = printer.end()
        if args.chat:
            chat = [*asked, {"role": "assistant", "content": answer}]


def fitting(
    generator: TextGenerator, opening: Sequence[ChatMessage], chat: Sequence[ChatMessage], max_new_tokens: int
) -> list[ChatMessage]:
    """Return the newest messages of a chat that fit the model's positions, beginning with a message of the user.

    The messages in `opening` come before them. The user is told how many messages are left out. Raises
    PositionRangeError if not even the last message fits.
    """
    for first in (place for place, message in enumerate(chat) if message["role"] == "user"):
        try:
            generator.check_room(len(generator.encode_chat([*opening, *chat[first:]])), max_new_tokens)
        except PositionRangeError:
            if first == len(chat) - 1:
                raise
        else:
            if first:
                tell(f"the conversation is longer than the model's positions; the first {first} messages are left out")
            return list(chat[first:])
    raise AssertionError("the last message is the user's")


def tell(text: str) -> None:
    """Print a message between the continuations."""
    print(plain(f"megatron-coca generate: {text}"), file=sys.stderr, flush=True)


def typed_lines() -> Iterator[str]:
    """Yield the typed lines that are not blank, until the end of the input. The arrow keys recall earlier lines."""
    with suppress(ImportError):  # some builds of Python lack readline; typed lines then have no history
        import readline  # noqa: F401  (`input` uses it)
    while True:
        try:
            line = input(SIGN)
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            print(f"megatron-coca generate: prompt: not {error.encoding}; type it again", file=sys.stderr)
            continue
        if line.strip():
            yield line


class Printer:
    """Prints a continuation while it grows."""

    def __init__(self) -> None:
        self.interrupted = False
        self._row: Continuation | None = None
        self._printed = 0

    def show(self, row: Continuation) -> None:
        """Print the new part of a text that later tokens will not change."""
        self._row = row
        self._print(row.settled)

    def break_line(self) -> None:
        """After an error, end the line of the unfinished text."""
        if self._printed:
            print(flush=True)

    def end(self) -> str:
        """Print the rest of the text and a line end. Return the text."""
        text = self._row.text if self._row is not None else ""
        self._print(text)
        print(" [stopped]" if self.interrupted else "", flush=True)
        return text

    def _print(self, text: str) -> None:
        if len(text) > self._printed:
            print(plain(text[self._printed :]), end="", flush=True)
            self._printed = len(text)
