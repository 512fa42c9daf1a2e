"""Retrieval tasks whose facts are sentences hidden in a haystack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from megatron_coca.evaluation.retrieval.cases import Case, Encoder, case_random
from megatron_coca.evaluation.retrieval.fitting import Prices, facts_of, fit
from megatron_coca.evaluation.retrieval.haystack import Haystack, HaystackDraft, Hidden
from megatron_coca.evaluation.retrieval.scoring import share_found


@dataclass(frozen=True)
class Puzzle:
    """What one prompt asks.

    Attributes:
        task: says what is to be done; stands first.
        hidden: put into the haystack.
        question: stands last.
        stub: how the answer begins, for models that are given its beginning.
        expected: what a right answer holds.
        in_lines: whether what is hidden has lines of its own.
    """

    task: str
    hidden: Sequence[Hidden]
    question: str
    stub: str
    expected: tuple[str, ...]
    in_lines: bool = False


Compose = Callable[[Random, int], Puzzle]
"""A puzzle for a length in tokens."""

Score = Callable[[str, Sequence[str]], float]
"""0 .. 1 for an answer and what is expected."""


@dataclass(frozen=True)
class HiddenTask:
    """A `cases.RetrievalTask`.

    Attributes:
        name: from which the random numbers of its cases follow, with seed, length and number.
        compose: draws the puzzle.
        haystack: around what is hidden.
        answer_stub: whether the prompt ends with the beginning of the answer.
        score_answer: reads an answer.
    """

    name: str
    compose: Compose
    haystack: Haystack
    answer_stub: bool = False
    score_answer: Score = share_found

    def make_cases(self, tokenizer: Encoder, length: int, count: int, seed: int) -> list[Case]:
        """As in `cases.RetrievalTask`."""
        prices = Prices(tokenizer)
        return [self._case(tokenizer, prices, length, number, seed) for number in range(count)]

    def score(self, answer: str, case: Case) -> float:
        """As in `cases.RetrievalTask`."""
        return self.score_answer(answer, case.expected)

    def _case(self, tokenizer: Encoder, prices: Prices, length: int, number: int, seed: int) -> Case:
        random = case_random(self.name, seed, length, number)
        puzzle = self.compose(random, length)
        first = 0 if self.haystack.restarts else random.randrange(len(self.haystack.sentences))
        question = with_stub(puzzle.question, puzzle.stub, self.answer_stub)
        draft = HaystackDraft(puzzle.task, self.haystack, puzzle.hidden, question, prices, first, puzzle.in_lines)
        fitted = fit(draft, tokenizer, length)
        ids = np.array(fitted.ids, dtype=np.int32)
        return Case(number, length, ids, puzzle.expected, facts_of(fitted, tokenizer))


def with_stub(question: str, stub: str, wanted: bool) -> str:
    """The last line of a prompt."""
    return f"{question} {stub}" if wanted else question


def number_of(random: Random, digits: int) -> str:
    """A number of so many digits, the first not 0; each alike."""
    return str(random.randrange(10 ** (digits - 1), 10**digits))
