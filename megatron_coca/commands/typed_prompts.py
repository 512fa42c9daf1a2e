"""Prompts typed at a terminal. Every line is a prompt, its continuation appears token by token, and Ctrl-D ends."""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.model import Sampling
from megatron_coca.support.plain_text import plain
from megatron_coca.text_generation import Continuation, TextGenerator

SIGN = "> "
WAITING = "Type a prompt and press Enter. Ctrl-C stops a continuation, Ctrl-D ends."
WAITING_IN_CHAT = "Type a message and press Enter. Ctrl-C stops an answer, Ctrl-D ends the conversation."


def answer_typed(generator: TextGenerator, args: Namespace, sampling: Sampling, options: dict[str, Any]) -> None:
    """Continue every typed prompt, or with `--chat` answer every message of one conversation, until Ctrl-D.

    A prompt that is typed again is sampled with the next seed. Raises EvaluationError if there is no chat template.
    """
    if args.chat and generator.tokenizer.chat is None:
        raise EvaluationError("--chat: the tokenizer has no chat template; leave out --chat")
    print(WAITING_IN_CHAT if args.chat else WAITING, file=sys.stderr, flush=True)
    chat = [] if args.system is None else [{"role": "system", "content": args.system}]
    times = Counter[str]()
    for text in typed_lines():
        own = replace(sampling, seed=sampling.seed + (0 if args.chat else times[text]))
        times[text] += 1
        printer = Printer()
        try:
            if args.chat:
                asked = [*chat, {"role": "user", "content": text}]
                generator.answer([asked], sampling=own, pushed=printer.show, **options)
            else:
                generator.complete([text], sampling=own, pushed=printer.show, **options)
        except KeyboardInterrupt:
            printer.interrupted = True
        except DataError as error:
            print(plain(f"megatron-coca generate: {error}"), file=sys.stderr)
            continue
        answer = printer.end()
        if args.chat:
            chat = [*asked, {"role": "assistant", "content": answer}]


def typed_lines() -> Iterator[str]:
    """Yield the typed lines that are not blank, until the end of the input. The arrow keys recall earlier lines."""
    with suppress(ImportError):  # some builds of Python lack it; the lines then have no history
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
