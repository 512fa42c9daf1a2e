"""Lengths as multiples of a checkpoint's training length L, such as 4L or 3L/4."""

import re
from argparse import Namespace
from collections.abc import Sequence

from megatron_coca.evaluation.results import EvaluationError

MULTIPLES = re.compile(r"\d+L(/[1-9]\d*)?(,\d+L(/[1-9]\d*)?)*")
"""One multiple, such as "4L" or "3L/4", or a list of multiples, such as "1L,4L"."""

LENGTH_OPTIONS = ("windows", "lengths", "stride", "max_length", "repeat", "short")
"""Task options whose values may be multiples."""


def is_multiple(text: object) -> bool:
    return isinstance(text, str) and MULTIPLES.fullmatch(text) is not None


def in_tokens(multiples: str, length: int) -> str:
    """Convert lengths that match `MULTIPLES` to tokens: "3L/4" becomes "384" for a training length of 512 tokens.

    Raises EvaluationError if a length is not a whole number of tokens.
    """
    lengths = []
    for part in multiples.split(","):
        factor, _, divisor = part.partition("/")
        tokens, rest = divmod(int(factor.removesuffix("L")) * length, int(divisor or 1))
        if rest:
            raise EvaluationError(
                f"{part}: is not a whole number of tokens for a training length of {length}; use another fraction"
            )
        lengths.append(str(tokens))
    return ",".join(lengths)


def changes_in_tokens(changes: Sequence[str], length: int) -> list[str]:
    """Return YAML files and KEY=VALUE changes, with multiples of the training length converted to tokens."""
    return [
        f"{key}={in_tokens(value, length)}" if MULTIPLES.fullmatch(value) else change
        for change in changes
        for key, _, value in [change.partition("=")]
    ]


def has_multiples(args: Namespace) -> bool:
    """Return whether an option of a task, `--set` or `--variant` contains a multiple."""
    lengths = [value for name in LENGTH_OPTIONS for value in _listed(getattr(args, name, None))]
    changes = [*getattr(args, "overrides", ()), *(change for given in getattr(args, "variant", ()) for change in given)]
    return any(map(is_multiple, [*lengths, *(change.partition("=")[2] for change in changes)]))


def converted(args: Namespace, length: int) -> Namespace:
    """Return the options of a task with all multiples converted for the training length `length`.

    Raises EvaluationError if a length is not a whole number of tokens.
    """

    def tokens(value: object) -> object:
        return int(in_tokens(str(value), length)) if is_multiple(value) else value

    options = vars(args) | {"overrides": changes_in_tokens(args.overrides, length)}
    options["variant"] = [[label, *changes_in_tokens(changes, length)] for label, *changes in args.variant]
    for name in (name for name in LENGTH_OPTIONS if name in options):
        value = options[name]
        options[name] = [tokens(each) for each in value] if isinstance(value, list) else tokens(value)
    return Namespace(**options)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
