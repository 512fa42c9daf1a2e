"""How answers are read."""

import re
from collections.abc import Sequence

_RUN = re.compile("[0-9]+")


def first_run(answer: str, digits: int) -> str | None:
    """The first unbroken run of exactly so many digits 0-9; None where there is none. A longer run holds no shorter
    one: "123456" has no five.
    """
    return next((run for run in _RUN.findall(answer) if len(run) == digits), None)


def share_found(answer: str, expected: Sequence[str]) -> float:
    """The share of the expected texts that stand somewhere in the answer, in upper or lower case (the string match of
    RULER, Hsieh et al. 2024).
    """
    return sum(text.lower() in answer.lower() for text in expected) / len(expected)
