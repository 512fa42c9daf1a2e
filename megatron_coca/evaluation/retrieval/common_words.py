"""The most frequent words of a list (RULER's common words extraction): what is asked for is spread over the text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_coca.evaluation.retrieval.cases import Case, Encoder, case_random
from megatron_coca.evaluation.retrieval.fitting import Prices, Text, fit
from megatron_coca.evaluation.retrieval.puzzles import with_stub
from megatron_coca.evaluation.retrieval.scoring import share_found
from megatron_coca.evaluation.retrieval.words import ADJECTIVES, COMPOUNDS, NOUNS, compounds

TASK = "Below is a list of words. Some of them occur more often than all others. Find out which."
QUESTION = "Which {count} words occur most often in the list?"
STUB = "The {count} words that occur most often are"


class Frequencies(NamedTuple):
    """How many words are common, how often each of them occurs, and how often each other word."""

    words: int
    common: int
    others: int


FREQUENCIES = (Frequencies(10, 30, 3), Frequencies(6, 10, 2), Frequencies(4, 4, 1))
"""The first are the paper's."""


def frequencies(length: int, prices: Prices) -> Frequencies:
    """The first of `FREQUENCIES` whose common words take at most half of the length, by the mean price of a compound;
    else the last.
    """
    sample = [f"{adjective}-{noun}," for adjective, noun in zip(ADJECTIVES, NOUNS, strict=False)]
    price = sum(map(prices, sample)) / len(sample)
    fitting = (each for each in FREQUENCIES if each.words * each.common * price <= length / 2)
    return next(fitting, FREQUENCIES[-1])


@dataclass(frozen=True)
class CommonWords:
    """A `cases.RetrievalTask`. No word is a fact by itself, so its cases have none."""

    answer_stub: bool = False

    def make_cases(self, tokenizer: Encoder, length: int, count: int, seed: int) -> list[Case]:
        """As in `cases.RetrievalTask`."""
        prices = Prices(tokenizer)
        return [self._case(tokenizer, prices, length, number, seed) for number in range(count)]

    def score(self, answer: str, case: Case) -> float:
        """The share of the common words in the answer."""
        return share_found(answer, case.expected)

    def _case(self, tokenizer: Encoder, prices: Prices, length: int, number: int, seed: int) -> Case:
        random, often = case_random("common_words", seed, length, number), frequencies(length, prices)
        # Compounds are made of fewer words than a prompt has tokens: more of them than that are not drawn.
        words = compounds(random, min(COMPOUNDS, often.words + length))
        expected = tuple(words[: often.words])
        question = with_stub(QUESTION, STUB, self.answer_stub).format(count=often.words)
        draft = _WordList(often, expected, words[often.words :], question, prices, random.getrandbits(64))
        ids = np.array(fit(draft, tokenizer, length).ids, dtype=np.int32)
        return Case(number, length, ids, expected, ())


class _WordList:
    """A prompt with any number of the other words; a `fitting.Draft`."""

    def __init__(
        self,
        often: Frequencies,
        common: Sequence[str],
        others: Sequence[str],
        question: str,
        prices: Prices,
        order: int,
    ) -> None:
        self.often, self.common, self.others, self.question = often, common, others, question
        self.order = order
        self.limit: int | None = len(others)
        self._prices, self._sums = prices, [0]

    def build(self, units: int) -> Text:
        """As in `fitting.Draft`."""
        words = [*_repeated(self.common, self.often.common), *_repeated(self.others[:units], self.often.others)]
        Random(self.order).shuffle(words)
        return Text(f"{TASK}\n{', '.join(words)}\n{self.question}")

    def predict(self, units: int) -> int:
        """As in `fitting.Draft`."""
        while len(self._sums) <= units:
            word = self.others[len(self._sums) - 1]
            self._sums.append(self._sums[-1] + self.often.others * self._prices(f"{word},"))
        return self._sums[units]


def _repeated(words: Iterable[str], times: int) -> list[str]:
    return [word for word in words for _ in range(times)]
