"""Checks before training that the prompts of tasks fit into their lengths."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.data import Tokenizer
from megatron_coca.data.builtin import builtin_folder
from megatron_coca.evaluation.suite import Command, task_parser
from megatron_coca.evaluation.tasks import TASKS, function_of
from megatron_coca.evaluation.tasks.retrieval.prompts import BUILTIN, LengthError


class PromptLengths:
    """Checks that prompts fit. Each check is made only once, because all models get the same prompts."""

    def __init__(self, prepare: bool = True) -> None:
        """Without `prepare`, prompts that need the built-in corpus are checked only if this corpus already exists."""
        self._prepare = prepare
        self._known: dict[str, str | None] = {}

    def faults(self, commands: Sequence[Command], tokenizer: Tokenizer, data_root: Path) -> list[str]:
        """Return an error line for each command with a length in tokens that is too short for one of its prompts.

        Raises the same errors as `load_haystack`.
        """
        checked = [command for command in commands if TASKS[command.arguments[0]].fits]
        lines = [self._fault(command, tokenizer, data_root) for command in checked]
        return [line for line in lines if line is not None]

    def _fault(self, command: Command, tokenizer: Tokenizer, data_root: Path) -> str | None:
        args: Namespace = task_parser(command.arguments[0]).parse_args(command.arguments[1:])
        args.task = command.arguments[0]
        key = json.dumps([command.task, args.lengths, tokenizer.fingerprint])
        if key not in self._known:
            self._known[key] = None
            builtin = list(getattr(args, "haystack", None) or []) == [BUILTIN]
            if builtin and not self._prepare and not builtin_folder(data_root).exists():
                return None
            try:
                function_of(TASKS[args.task].fits)(args, tokenizer, data_root)
            except LengthError as error:
                self._known[key] = f"tasks.{command.task}: {error}"
        return self._known[key]
