"""What a retrieval task is: prompts with known answers, and how an answer is scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from megatron_coca.evaluation.results import EvaluationError


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
