"""The methods that `megatron-coca stretch` compares. They need no training."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_coca.evaluation.results import EvaluationError

PLAIN = "plain"
MOST = 1024
"""The longest input in training lengths."""

Changes = Callable[[float, int], list[str]]
"""A function (factor, training length) -> config overrides."""


def _extension(kind: str) -> Changes:
    return lambda factor, length: [f"rope_scaling.rope_type={kind}", f"rope_scaling.factor={factor:g}"]


def _map(kind: str, *more: str) -> Changes:
    return lambda factor, length: [f"relative_positions.type={kind}", *more]


CHOICES: dict[str, Changes] = {
    PLAIN: lambda factor, length: [],
    "pi": _extension("linear"),
    "ntk": _extension("ntk"),
    "dynamic": _extension("dynamic"),
    "yarn": _extension("yarn"),
    "dynamic_yarn": lambda factor, length: ["rope_scaling.rope_type=dynamic_yarn"],
    "log_n": lambda factor, length: ["logit_scaling=log_n"],
    "rerope": _map("rerope"),
    "rerope+log_n": _map("rerope", "logit_scaling=log_n"),
    "leaky_rerope": _map("leaky_rerope"),
    "self_extend": lambda factor, length: [
        "relative_positions.type=self_extend",
        f"relative_positions.group_size={max(2, 2 * math.ceil(factor))}",  # half of the training length is the window
    ],
    "dual_chunk": _map("dual_chunk"),
    "lm_infinite": _map("lm_infinite"),
}
"""The config overrides of each method. The factor is the number after the colon, or else that of --to."""

DEFAULT = (PLAIN, "dynamic:2", "yarn", "rerope", "rerope+log_n", "self_extend", "dual_chunk", "lm_infinite")
_NAME = re.compile(r"([a-z_+]+)(?::(\d+(?:\.\d+)?))?")


class Method(NamedTuple):
    """A compared method: its name in tables, and the config overrides that select it."""

    name: str
    overrides: tuple[str, ...]


def chosen_methods(names: Sequence[str], to: float, length: int, place: str = "--methods") -> list[Method]:
    """Return the methods with these names, `plain` first. Raises EvaluationError for an unknown name.

    `place` names the option or file in messages.
    """
    found = {}
    for name in dict.fromkeys((PLAIN, *names)):
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in CHOICES:
            raise EvaluationError(f"{place} {name}: unknown method; name some of {', '.join(CHOICES)}")
        factor = float(match[2] or to)
        if match[2] and CHOICES[match[1]](factor, length) == CHOICES[match[1]](factor + 8, length):
            raise EvaluationError(f"{place} {name}: {match[1]} has no factor; leave out :{match[2]}")
        shown = f"{match[1]}:{factor:g}" if match[2] else name
        found[shown] = Method(shown, tuple(CHOICES[match[1]](factor, length)))
    return list(found.values())


def simplicity(name: str) -> tuple[bool, int, int]:
    """Return the place of a method in the order of simplicity; the smallest is the simplest.

    The plain model comes first, then methods are ordered by the number of config keys that they set, then by CHOICES.
    """
    kind, _, factor = name.partition(":")
    return kind != PLAIN, len(CHOICES[kind](float(factor or 2), 1)), list(CHOICES).index(kind)


def multiples_up_to(to: float) -> list[float]:
    """Return 1, 2, 4, .. and `to`, the multiples of the training length that are measured."""
    powers = [2.0**power for power in range(int(math.log2(to)) + 1)]
    return sorted({*powers, float(to)})
