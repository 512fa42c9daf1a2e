"""The record of chat settings in result files. This module imports no tokenizer, so that `--help` is fast."""

import json

from pydantic import JsonValue

from megatron_coca.evaluation.results import Record

DIGITS = 12
"""Number of digits of a template's hash in reports; result files contain the whole hash."""


class ChatRecord(Record):
    """The chat settings of a measurement, which are part of its identity."""

    template_sha256: str
    symbols: dict[str, str] | None = None  # special tokens that the template can print, by name; None in older files
    system: str | None = None
    multiturn: bool | None = None  # whether examples are turns of the chat; None for a task without examples
    variables: dict[str, JsonValue] | None = None  # further variables that the template reads; None if it has none
    date: str | None = None  # date of the run if the template prints it; keeps prompts of two days apart

    def __str__(self) -> str:
        system = "" if self.system is None else f", system message {self.system!r}"
        turns = {None: "", True: ", examples as turns", False: ", examples in one message"}[self.multiturn]
        values = "" if not self.variables else f", with {json.dumps(self.variables)}"
        day = "" if self.date is None else f", of {self.date}"
        return f"template {self.template_sha256[:DIGITS]}{system}{turns}{values}{day}"
