"""Checks of the options and the template of chat-formatted prompts."""

import datetime
import hashlib
from argparse import Namespace
from dataclasses import replace

from megatron_coca.data import Tokenizer
from megatron_coca.data.tokenizers.chat import with_variables
from megatron_coca.evaluation.chat_settings import ChatRecord
from megatron_coca.evaluation.results import EvaluationError


def chat_record(args: Namespace, tokenizer: Tokenizer) -> ChatRecord | None:
    """Return the chat settings, or None without `--apply-chat-template`. Raises EvaluationError if an option needs
    `--apply-chat-template`, or if the tokenizer has no chat template.
    """
    multiturn = getattr(args, "fewshot_as_multiturn", None)
    if not args.apply_chat_template:
        given = {"--system-instruction": args.system_instruction is not None, "--fewshot-as-multiturn": multiturn}
        given["--chat-template-kwargs"] = args.chat_template_kwargs
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
    tokenizer.chat = with_variables(tokenizer.chat, args.chat_template_kwargs)
    tokenizer.turn_ends()  # raises if the tokenizer cannot encode chats or the template has an error
    digest = hashlib.sha256(tokenizer.chat.source.encode()).hexdigest()
    if hasattr(args, "fewshot_as_multiturn") and multiturn is None:
        multiturn = True  # the default of the harness
    today = datetime.date.today().isoformat() if "strftime_now" in tokenizer.chat.source else None
    if today is not None:  # prompts after midnight keep this date
        tokenizer.chat = replace(tokenizer.chat, now=today)
    named = {name: symbol for name, symbol in sorted(tokenizer.chat.symbols.items()) if name in tokenizer.chat.source}
    return ChatRecord(
        template_sha256=digest,
        symbols=named,
        system=args.system_instruction,
        multiturn=multiturn,
        variables=dict(tokenizer.chat.variables) or None,
        date=today,
    )
