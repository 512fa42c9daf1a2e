"""Tasks in the manner of RULER (Hsieh et al. 2024, arXiv 2404.06654), in our own words: several facts, chains of
facts, and a property of the whole text.

How much is hidden follows from the length, so that the tasks can be set from some 512 tokens on.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_coca.evaluation.retrieval.cases import (
    Case,
    Encoder,
    Prices,
    RetrievalTask,
    Text,
    case_random,
    fit,
    share_found,
)
from megatron_coca.evaluation.retrieval.haystack import Haystack, Hidden, uniform_gap
from megatron_coca.evaluation.retrieval.tasks import (
    ADJECTIVES,
    COMPOUNDS,
    NOUNS,
    HiddenTask,
    Puzzle,
    compounds,
    number_of,
    variables,
    with_stub,
)

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


PROTOCOL = (
    "RULER-style: prompts of whole sentences (or words), as many as fit into the length in tokens; what is hidden "
    "stands uniformly between the sentences, and its amount follows from the length; greedy decoding up to the "
    "end-of-document token; score = share of the expected texts that stand anywhere in the answer"
)

DIGITS, VALUE_DIGITS = 7, 5

CODES = "Codes of different things are hidden in the text below. Remember them: you will be asked for some of them."
ASSIGNMENTS = (
    "Variables are given values in the text below. Remember which variable has which value: you will be asked for it."
)


def multi_key(random: Random, length: int) -> Puzzle:
    """One of several codes is asked for."""
    names = compounds(random, 1 + within(length // 128, 1, 32))
    codes = _codes(random, names)
    hidden = [_code(random, name, code, wanted=name == names[0]) for name, code in zip(names, codes, strict=True)]
    question, stub = f"What is the code of the {names[0]}?", f"The code of the {names[0]} is"
    return Puzzle(CODES, hidden, question, stub, (codes[0],))


def multi_value(random: Random, length: int) -> Puzzle:
    """All codes of one thing are asked for."""
    names = compounds(random, 1) * within(length // 128, 2, 4)
    codes = _codes(random, names)
    hidden = [_code(random, name, code) for name, code in zip(names, codes, strict=True)]
    question, stub = f"What are all codes of the {names[0]}?", f"The codes of the {names[0]} are"
    return Puzzle(CODES, hidden, question, stub, tuple(codes))


def multi_query(random: Random, length: int) -> Puzzle:
    """The codes of several things are asked for at once."""
    names = compounds(random, within(length // 128, 2, 4))
    codes = _codes(random, names)
    hidden = [_code(random, name, code) for name, code in zip(names, codes, strict=True)]
    listed = ", ".join(f"the {name}" for name in names[:-1]) + f" and the {names[-1]}"
    return Puzzle(CODES, hidden, f"What are the codes of {listed}?", f"The codes of {listed} are", tuple(codes))


def variable_tracking(random: Random, length: int) -> Puzzle:
    """All variables with one value are asked for; each is given the value of the one before."""
    hops, chains = within(length // 128, 1, 4), 1 + within(length // 512, 1, 3)
    names = variables(random, chains * (hops + 1))
    values = _distinct(random, VALUE_DIGITS, chains)
    wanted = names[: hops + 1]
    hidden = [
        assignment
        for chain, value in enumerate(values)
        for assignment in _chain(random, names[chain * (hops + 1) :][: hops + 1], value, wanted=chain == 0)
    ]
    question = f"Which variables have the value {values[0]}? Name all {len(wanted)} of them."
    return Puzzle(ASSIGNMENTS, hidden, question, f"The variables with the value {values[0]} are", tuple(wanted))


def within(number: int, low: int, high: int) -> int:
    """`number`, or the bound that it exceeds."""
    return max(low, min(high, number))


def _codes(random: Random, names: Sequence[str]) -> list[str]:
    return _distinct(random, DIGITS, len(names))


def _distinct(random: Random, digits: int, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[number_of(random, digits)] = None
    return list(found)


def _code(random: Random, name: str, code: str, wanted: bool = True) -> Hidden:
    return Hidden(uniform_gap(random.random()), f"The code of the {name} is {code}.", code if wanted else None)


def _chain(random: Random, names: Sequence[str], value: str, wanted: bool) -> list[Hidden]:
    """Assignments in the order of the text."""
    places = sorted(random.random() for _ in names)
    return [
        Hidden(uniform_gap(place), f"Let {name} = {source}.", name if wanted else None)
        for place, name, source in zip(places, names, [value, *names], strict=False)
    ]


def _hidden(name: str, compose: Callable[[Random, int], Puzzle]) -> Callable[[Haystack, bool], RetrievalTask]:
    return lambda haystack, answer_stub: HiddenTask(name, compose, haystack, answer_stub)


RULER_TASKS: dict[str, Callable[[Haystack, bool], RetrievalTask]] = {
    "multi_key": _hidden("multi_key", multi_key),
    "multi_value": _hidden("multi_value", multi_value),
    "multi_query": _hidden("multi_query", multi_query),
    "variable_tracking": _hidden("variable_tracking", variable_tracking),
    "common_words": lambda haystack, answer_stub: CommonWords(answer_stub),
}
"""By name: makes the task for a haystack, with or without the beginning of the answer."""
