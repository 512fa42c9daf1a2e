"""Retrieval tasks: passkey, needle, and RULER-style tasks (Hsieh et al. 2024, arXiv 2404.06654) in our own words.

The amount of hidden information follows from the length, so the RULER-style tasks can be built from about 512 tokens
on.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_coca.data import Tokenizer
from megatron_coca.evaluation.retrieval import prompts
from megatron_coca.evaluation.retrieval.prompts import Case, Draft, Haystack, HaystackDraft, Hidden, Text, TokenCosts
from megatron_coca.safe_yaml import read_yaml

PASSKEY_PROTOCOL = (
    "passkey: task, filler, passkey, filler, question, one piece a line; each stretch of filler repeats the block of "
    "five sentences whole, with as many blocks as fit into the length in tokens; key uniform in 10000..99999, in any "
    "gap between two blocks alike; greedy decoding up to the end-of-document token; right if the first unbroken run of "
    "exactly five digits in the answer is the key; distance in tokens from the key's first mention to the prompt's end"
)
NEEDLE_PROTOCOL = (
    "needle: task, haystack with one needle sentence in the gap between sentences that is nearest to the depth, "
    "question; whole sentences, as many as fit into the length in tokens; city and seven-digit code drawn for each "
    "case; greedy decoding up to the end-of-document token; right if the code stands anywhere in the answer"
)
RULER_PROTOCOL = (
    "RULER-style: prompts of whole sentences (or words), as many as fit into the length in tokens; what is hidden "
    "stands uniformly between the sentences, and its amount follows from the length; greedy decoding up to the "
    "end-of-document token; score = share of the expected texts that stand anywhere in the answer"
)
# The protocols are part of the identity of result files: another text would be another measurement.


CITIES, ADJECTIVES, NOUNS = (
    tuple(words.split()) for words in read_yaml(Path(__file__).with_name("words.yaml")).values()
)
COMPOUNDS = len(ADJECTIVES) * len(NOUNS)


def compounds(random: Random, count: int) -> list[str]:
    """Draw that many different words such as "quiet-river", at most `COMPOUNDS`."""
    numbers = random.sample(range(COMPOUNDS), count)
    return [f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers]


def variables(random: Random, count: int) -> list[str]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    numbers = random.sample(range(26**4), count)
    return ["".join(letters[number // 26**place % 26] for place in range(4)) for number in numbers]


def random_number(random: Random, digits: int) -> str:
    return str(random.randrange(10 ** (digits - 1), 10**digits))


def distinct_numbers(random: Random, digits: int, count: int) -> list[str]:
    numbers: dict[str, None] = {}
    while len(numbers) < count:
        numbers[random_number(random, digits)] = None
    return list(numbers)


def first_run(answer: str, digits: int) -> str | None:
    """Return the first unbroken run of exactly that many digits 0-9, or None; "123456" contains no run of five."""
    return next((run for run in re.findall("[0-9]+", answer) if len(run) == digits), None)


def passkey_score(answer: str, expected: Sequence[str]) -> float:
    return float(first_run(answer, 5) == expected[0])


def share_found(answer: str, expected: Sequence[str]) -> float:
    """Return the fraction of the expected strings in the answer, ignoring case (RULER's string match)."""
    return sum(text.lower() in answer.lower() for text in expected) / len(expected)


Compose = Callable[[Random, int, TokenCosts], tuple[Draft, tuple[str, ...]]]
"""Draws a prompt for a length in tokens, and the strings that a right answer contains."""


@dataclass(frozen=True)
class RetrievalTask:
    """A kind of prompts with known answers; random numbers of a case follow from `name`, seed, length and number."""

    name: str
    compose: Compose
    score_answer: Callable[[str, Sequence[str]], float] = share_found

    def make_cases(self, tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Case]:
        """Return cases 0 .. count-1 of at most `length` tokens; they do not depend on other lengths or on `count`.

        Raises LengthError for a length that is too short or too long.
        """
        costs, cases = TokenCosts(tokenizer), []
        for number in range(count):
            random = Random(f"{self.name}/{seed}/{length}/{number}")
            draft, expected = self.compose(random, length, costs)
            fitted = prompts.fit(draft, tokenizer, length)
            ids = np.array(fitted.ids, dtype=np.int32)
            cases.append(Case(number, ids, expected, prompts.facts_of(fitted, tokenizer)))
        return cases


class Puzzle(NamedTuple):
    """Content of one haystack prompt: `stub` is the beginning of the answer, for models that are given it."""

    description: str
    hidden: Sequence[Hidden]
    question: str
    stub: str
    expected: tuple[str, ...]
    in_lines: bool = False


def in_haystack(puzzle: Callable[[Random, int], Puzzle], haystack: Haystack, answer_stub: bool) -> Compose:
    """Return a task's `compose` that hides what `puzzle` draws in `haystack`."""

    def compose(random: Random, length: int, costs: TokenCosts) -> tuple[Draft, tuple[str, ...]]:
        content = puzzle(random, length)
        first = 0 if haystack.restarts else random.randrange(len(haystack.sentences))
        question = f"{content.question} {content.stub}" if answer_stub else content.question
        draft = HaystackDraft(content.description, haystack, content.hidden, question, costs, first, content.in_lines)
        return draft, content.expected

    return compose


def passkey(answer_stub: bool = False) -> RetrievalTask:
    def puzzle(random: Random, length: int) -> Puzzle:
        key = random_number(random, 5)
        hidden = Hidden(
            prompts.inner_gap(random.random()), f"The passkey is {key}. Remember it. {key} is the passkey.", key
        )
        description = (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will "
            "quiz you about the important information there."
        )
        stub = "The pass key is"  # the original prompt's
        return Puzzle(description, [hidden], "What is the passkey?", stub, (key,), in_lines=True)

    return RetrievalTask("passkey", in_haystack(puzzle, prompts.FILLER_BLOCKS, answer_stub), passkey_score)


def needle(depth: int, haystack: Haystack, answer_stub: bool = False) -> RetrievalTask:
    """Return the needle task at a depth in percent of the sentences; see `NEEDLE_PROTOCOL`."""

    def puzzle(random: Random, length: int) -> Puzzle:
        city, code = random.choice(CITIES), random_number(random, 7)
        hidden = Hidden(prompts.depth_gap(depth / 100), f"The code of {city} is {code}.", code)
        description = (
            "Somewhere in the text below stands the code of a city. Remember it: you will be asked for it after the "
            "text."
        )
        return Puzzle(description, [hidden], f"What is the code of {city}?", f"The code of {city} is", (code,))

    return RetrievalTask(f"needle at {depth}", in_haystack(puzzle, haystack, answer_stub))


def within(number: int, low: int, high: int) -> int:
    return max(low, min(high, number))


CODES = "Codes of different things are hidden in the text below. Remember them: you will be asked for some of them."


def hidden_code(random: Random, name: str, code: str, is_asked: bool = True) -> Hidden:
    text = f"The code of the {name} is {code}."
    return Hidden(prompts.uniform_gap(random.random()), text, code if is_asked else None)


def multi_key(random: Random, length: int) -> Puzzle:
    names = compounds(random, 1 + within(length // 128, 1, 32))
    codes = distinct_numbers(random, 7, len(names))
    hidden = [hidden_code(random, name, code, name == names[0]) for name, code in zip(names, codes, strict=True)]
    question, stub = f"What is the code of the {names[0]}?", f"The code of the {names[0]} is"
    return Puzzle(CODES, hidden, question, stub, (codes[0],))


def multi_value(random: Random, length: int) -> Puzzle:
    (name,) = compounds(random, 1)
    codes = distinct_numbers(random, 7, within(length // 128, 2, 4))
    hidden = [hidden_code(random, name, code) for code in codes]
    return Puzzle(CODES, hidden, f"What are all codes of the {name}?", f"The codes of the {name} are", tuple(codes))


def multi_query(random: Random, length: int) -> Puzzle:
    names = compounds(random, within(length // 128, 2, 4))
    codes = distinct_numbers(random, 7, len(names))
    hidden = [hidden_code(random, name, code) for name, code in zip(names, codes, strict=True)]
    listed = ", ".join(f"the {name}" for name in names[:-1]) + f" and the {names[-1]}"
    return Puzzle(CODES, hidden, f"What are the codes of {listed}?", f"The codes of {listed} are", tuple(codes))


def variable_tracking(random: Random, length: int) -> Puzzle:
    """The answer is all variables with one value; each is assigned the one before it."""
    hops, chains = within(length // 128, 1, 4), 1 + within(length // 512, 1, 3)
    names = variables(random, chains * (hops + 1))
    values = distinct_numbers(random, 5, chains)
    hidden = []
    for chain, value in enumerate(values):
        chained = names[chain * (hops + 1) :][: hops + 1]
        fractions = sorted(random.random() for _ in chained)
        hidden += [
            Hidden(prompts.uniform_gap(fraction), f"Let {name} = {source}.", name if chain == 0 else None)
            for fraction, name, source in zip(fractions, chained, [value, *chained], strict=False)
        ]
    expected = tuple(names[: hops + 1])
    description = (
        "Variables are given values in the text below. Remember which variable has which value: you will be asked for "
        "it."
    )
    question = f"Which variables have the value {values[0]}? Name all {len(expected)} of them."
    return Puzzle(description, hidden, question, f"The variables with the value {values[0]} are", expected)


class Frequencies(NamedTuple):
    """Number of common words, how often each of them occurs, and how often each other word."""

    words: int
    common: int
    others: int


FREQUENCIES = (Frequencies(10, 30, 3), Frequencies(6, 10, 2), Frequencies(4, 4, 1))
"""The first are the paper's."""


def common_words(haystack: Haystack, answer_stub: bool) -> RetrievalTask:
    """Return the task that asks for the most frequent words of a list; there are no facts and no `haystack`."""

    def compose(random: Random, length: int, costs: TokenCosts) -> tuple[Draft, tuple[str, ...]]:
        # The first whose common words take at most half of the length, by the mean cost of a compound.
        sample = [f"{adjective}-{noun}," for adjective, noun in zip(ADJECTIVES, NOUNS, strict=False)]
        cost = sum(map(costs, sample)) / len(sample)
        fitting = (times for times in FREQUENCIES if times.words * times.common * cost <= length / 2)
        times = next(fitting, FREQUENCIES[-1])
        # A prompt has fewer words than tokens, so it needs no more words than that.
        words = compounds(random, min(COMPOUNDS, times.words + length))
        common = tuple(words[: times.words])
        question = f"Which {times.words} words occur most often in the list?"
        if answer_stub:
            question += f" The {times.words} words that occur most often are"
        return WordList(times, common, words[times.words :], question, costs, random.getrandbits(64)), common

    return RetrievalTask("common_words", compose)


@dataclass
class WordList:
    """A `Draft` whose units are the words that are not common, each repeated `times.others` times."""

    times: Frequencies
    common: Sequence[str]
    others: Sequence[str]
    question: str
    costs: TokenCosts
    order: int
    _sums: list[int] = field(default_factory=lambda: [0])

    @property
    def limit(self) -> int | None:
        return len(self.others)

    def build(self, units: int) -> Text:
        """Return the words in random order, without facts."""
        words = [word for word in self.common for _ in range(self.times.common)]
        words += [word for word in self.others[:units] for _ in range(self.times.others)]
        Random(self.order).shuffle(words)
        description = "Below is a list of words. Some of them occur more often than all others. Find out which."
        return Text(f"{description}\n{', '.join(words)}\n{self.question}")

    def predict(self, units: int) -> int:
        while len(self._sums) <= units:
            word = self.others[len(self._sums) - 1]
            self._sums.append(self._sums[-1] + self.times.others * self.costs(f"{word},"))
        return self._sums[units]


HIDDEN = {
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
}


def hidden_task(name: str, haystack: Haystack, answer_stub: bool) -> RetrievalTask:
    return RetrievalTask(name, in_haystack(HIDDEN[name], haystack, answer_stub))


RULER_TASKS: dict[str, Callable[[Haystack, bool], RetrievalTask]] = {
    **{name: partial(hidden_task, name) for name in HIDDEN},
    "common_words": common_words,
}
"""Makes each task for a haystack, with or without the beginning of the answer; names as `options.RULER_NAMES`."""
