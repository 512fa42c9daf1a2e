"""Tasks in the manner of RULER (Hsieh et al. 2024, arXiv 2404.06654), in our own words: several facts, chains of
facts, and a property of the whole text.

How much is hidden follows from the length, so that the tasks can be set from some 512 tokens on.
"""

from collections.abc import Callable, Sequence
from random import Random

from megatron_coca.evaluation.retrieval.cases import RetrievalTask
from megatron_coca.evaluation.retrieval.common_words import CommonWords
from megatron_coca.evaluation.retrieval.haystack import Haystack, Hidden, uniform_gap
from megatron_coca.evaluation.retrieval.puzzles import HiddenTask, Puzzle, number_of
from megatron_coca.evaluation.retrieval.words import compounds, variables

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
