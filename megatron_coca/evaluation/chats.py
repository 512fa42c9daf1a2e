"""Chat-formatted prompts: their record in result files, and checks of their options and template."""

import datetime
import hashlib
from argparse import Namespace
from dataclasses import replace

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.results import EvaluationError, Record

DIGITS = 12
"""Number of digits of a template's hash in reports; result files contain the whole hash."""


class ChatRecord(Record):
    """The chat settings of a measurement, which are part of its identity."""

    template_sha256: str
    symbols: dict[str, str] | None = None  # special tokens that the template can print, by name; None in older files
    system: str | None = None
    multiturn: bool | None = None  # whether examples are turns of the chat; None for a task without examples
    date: str | None = None  # today's date if the template prints it, so that prompts of two days are not mixed

    def __str__(self) -> str:
        system = "" if self.system is None else f", system message {self.system!r}"
        turns = {None: "", True: ", examples as turns", False: ", examples in one message"}[self.multiturn]
        day = "" if self.date is None else f", of {self.date}"
        return f"template {self.template_sha256[:DIGITS]}{system}{turns}{day}"


def chat_record(args: Namespace, tokenizer: Tokenizer) -> ChatRecord | None:
    """Return the chat settings, or None without `--apply-chat-template`. Raises EvaluationError for its options."""
    multiturn = getattr(args, "fewshot_as_multiturn", None)
    if not args.apply_chat_template:
        given = {"--system-instruction": args.system_instruction is not None, "--fewshot-as-multiturn": multiturn}
        given["--plain-tasks"] = getattr(args, "plain_tasks", ())
        for option in (name for name, used in given.items() if used):
            raise EvaluationError(
                f"{option}: has no effect without --apply-chat-template; add that option, or remove {option}"
            )
        return None
    if tokenizer.chat is None:
        raise EvaluationError(
            "--apply-chat-template: the tokenizer has no chat template; put chat_template.jinja next to the model's "
            "tokenizer.json, or train on chats"
        )
    tokenizer.turn_ends()  # raises if the tokenizer cannot encode chats or the template has an error
    digest = hashlib.sha256(tokenizer.chat.source.encode()).hexdigest()
    if hasattr(args, "fewshot_as_multiturn") and multiturn is None:
        multiturn = True  # the default of the harness
    today = datetime.date.today().isoformat() if "strftime_now" in tokenizer.chat.source else None
    if today is not None:  # prompts after midnight keep this date
        tokenizer.chat = replace(tokenizer.chat, now=today)
    named = {name: symbol for name, symbol in sorted(tokenizer.chat.symbols.items()) if name in tokenizer.chat.source}
    return ChatRecord(
        template_sha256=digest, symbols=named, system=args.system_instruction, multiturn=multiturn, date=today
    )
