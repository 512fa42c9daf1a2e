"""What a retrieval task is: prompts with known answers, and how an answer is scored."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from megatron_coca.evaluation.results import EvaluationError

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


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class LengthError(EvaluationError):
    """A length at which a task cannot be set."""


@dataclass(frozen=True)
class Fact:
    """Where something that is asked for stands: the share of the filler sentences before it, and the number of tokens
    from the first one that says it to the end of the prompt, both included.
    """

    depth: float
    distance: int


@dataclass(frozen=True)
class Case:
    """One prompt.

    Attributes:
        number: of the case among those of its task, length and seed.
        length: asked for, in tokens.
        prompt: token ids, int32 [at most length].
        expected: what a right answer holds.
        facts: in the order of the text; none where the whole text is the fact.
    """

    number: int
    length: int
    prompt: np.ndarray
    expected: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def distance(self) -> int | None:
        """Of the fact that is farthest from the end."""
        return max((fact.distance for fact in self.facts), default=None)


class RetrievalTask(Protocol):
    """A kind of prompts. Cases depend on nothing but the arguments: not on other lengths, nor on how many there are."""

    def make_cases(self, tokenizer: Encoder, length: int, count: int, seed: int) -> list[Case]:
        """Cases 0 .. count-1 of at most `length` tokens. Raises LengthError where that is too short, or too long."""

    def score(self, answer: str, case: Case) -> float:
        """0 .. 1 for the text that a model generated."""


def case_random(*names: object) -> Random:
    """Random numbers that follow from names and numbers alone, on every machine."""
    return Random("/".join(map(str, names)))


TRUSTED_TRIES = 4


@dataclass(frozen=True)
class Mark:
    """A fact in a text: the share of the filler before it, and the number of characters before what says it."""

    depth: float
    offset: int


@dataclass(frozen=True)
class Text:
    """A prompt and its facts, in the order of the text."""

    text: str
    marks: tuple[Mark, ...] = ()


class Draft(Protocol):
    """A prompt that any number of filler units can be put into."""

    limit: int | None
    """As many units as there are, or None for any number."""

    def build(self, units: int) -> Text:
        """The prompt with that many units."""

    def predict(self, units: int) -> int:
        """About how many tokens these units add to the prompt; it never falls by more than a few as units grow."""


class Prices:
    """What a piece of text adds to a text in which it stands between spaces, in tokens. Each piece is asked for once."""

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._known:
            count = [len(self._tokenizer.encode(each)) for each in (f"{text} {text}", text)]
            self._known[text] = count[0] - count[1]
        return self._known[text]


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits: its text, token ids and number of units."""

    text: Text
    ids: list[int]
    units: int


def fit(draft: Draft, tokenizer: Encoder, length: int) -> Fitted:
    """The prompt with the most units that has at most `length` tokens, tokenised as one text.

    The prediction says how many units to try, and its error at what was tried corrects it: mostly two or three tries.
    That one more unit would be too many is the prediction's word, corrected in the same way. After some tries the middle
    of what is left is taken instead, so that no prediction can make them many.

    Raises:
        LengthError: not even the prompt without filler fits, or there are too few units.
    """
    best = _fitted(draft, tokenizer, 0)
    if len(best.ids) > length:
        raise LengthError(
            f"length {length}: the prompt has {len(best.ids)} tokens without any filler; ask for a greater length"
        )
    error = at_best = len(best.ids) - draft.predict(0)
    too_many = None if draft.limit is None else draft.limit + 1
    for tries in itertools.count():
        count = _most(draft, length - error, best.units, too_many)
        if count == best.units and (error == at_best or count + 1 == too_many):
            break
        trusted = tries < TRUSTED_TRIES or too_many is None
        between = (best.units + (too_many or 0)) // 2
        tried = _fitted(draft, tokenizer, max(count if trusted else between, best.units + 1))
        error = len(tried.ids) - draft.predict(tried.units)
        if len(tried.ids) <= length:
            best, at_best = tried, error
        else:
            too_many = tried.units
    if best.units == draft.limit:
        raise LengthError(f"length {length}: all filler there is makes {len(best.ids)} tokens; ask for less")
    return best


def _fitted(draft: Draft, tokenizer: Encoder, units: int) -> Fitted:
    text = draft.build(units)
    return Fitted(text, tokenizer.encode(text.text), units)


def _most(draft: Draft, tokens: int, low: int, above: int | None) -> int:
    """The largest number of units, at least `low` and below `above`, that is predicted to add at most `tokens`."""
    high = low + 1
    while (above is None or high < above) and draft.predict(high) <= tokens:
        high *= 2
    high = high if above is None else min(high, above)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if draft.predict(middle) <= tokens else (low, middle)
    return low


def facts_of(fitted: Fitted, tokenizer: Encoder) -> tuple[Fact, ...]:
    """Where the facts of a prompt stand: the text before each is tokenised alone and counted."""
    text, count = fitted.text.text, len(fitted.ids)
    return tuple(
        Fact(mark.depth, count - len(tokenizer.encode(text[: mark.offset].rstrip()))) for mark in fitted.text.marks
    )
