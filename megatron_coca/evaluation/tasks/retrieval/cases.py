"""Retrieval tasks: passkey, needle, and RULER-style tasks (Hsieh et al. 2024, arXiv 2404.06654) in our own wording.

The RULER-style tasks need about 512 tokens or more. The longer the prompt, the more facts they hide.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from megatron_coca.data import Tokenizer, load_tokenizer
from megatron_coca.evaluation.tasks.retrieval import prompts
from megatron_coca.evaluation.tasks.retrieval.prompts import Case, Draft, Haystack, Hidden, PromptForm
from megatron_coca.support.safe_yaml import read_yaml

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
# The protocols are part of the identity of result files: if a string changes, earlier files are not resumed.


CITIES, ADJECTIVES, NOUNS = (
    tuple(words.split()) for words in read_yaml(Path(__file__).with_name("words.yaml")).values()
)
COMPOUNDS = len(ADJECTIVES) * len(NOUNS)
SAMPLE_LENGTH = 4096
"""Length in bytes of the prompts in `sample_digest`."""


def compounds(random: Random, count: int) -> list[str]:
    """Draw `count` different words such as "quiet-river"; `count` must be at most `COMPOUNDS`."""
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
    """Return the first run of exactly `digits` digits 0-9, or None; "123456" contains no run of five digits."""
    return next((run for run in re.findall("[0-9]+", answer) if len(run) == digits), None)


def passkey_score(answer: str, expected: Sequence[str]) -> float:
    return float(first_run(answer, len(expected[0])) == expected[0])


def share_found(answer: str, expected: Sequence[str]) -> float:
    """Return RULER's string match: the fraction of the expected strings that the answer contains, ignoring case."""
    return sum(text.lower() in answer.lower() for text in expected) / len(expected)


class Puzzle(NamedTuple):
    """Content of one prompt. `stub` is the beginning of the answer, which the task appends if `answer_stub` is set."""

    description: str
    hidden: Sequence[Hidden]
    question: str
    stub: str
    expected: tuple[str, ...]
    in_lines: bool = False


@dataclass(frozen=True)
class RetrievalTask:
    """A kind of prompt with a known answer. A case's random numbers depend on `name`, seed, length and case number.

    `puzzle` takes a random generator and a length in tokens, and draws the sentences to hide in `haystack`. With
    `answer_stub`, the prompt ends with the beginning of the answer.
    """

    name: str
    puzzle: Callable[[Random, int], Puzzle]
    haystack: Haystack
    answer_stub: bool = False
    score_answer: Callable[[str, Sequence[str]], float] = share_found

    def make_cases(self, form: Tokenizer | PromptForm, length: int, count: int, seed: int) -> list[Case]:
        """Return cases 0 .. count-1 of at most `length` tokens. A case depends neither on other lengths nor on `count`.

        Raises LengthError if `length` is too short.
        """
        form = PromptForm(form) if isinstance(form, Tokenizer) else form
        cases = []
        for number in range(count):
            puzzle, draft = self._draft(length, number, seed)
            stub = puzzle.stub if self.answer_stub else ""
            fitted = prompts.fit(draft, form, length, stub)
            ids = np.array(fitted.ids, dtype=np.int32)
            cases.append(Case(number, ids, puzzle.expected, prompts.facts_of(fitted, form), stub))
        return cases

    def check_length(self, form: PromptForm, length: int, count: int, seed: int) -> None:
        """Raise LengthError if `length` is too short for one of the cases that `make_cases` would make."""
        for number in range(count):
            puzzle, draft = self._draft(length, number, seed)
            prompts.shortest(draft, form, length, puzzle.stub if self.answer_stub else "")

    def _draft(self, length: int, number: int, seed: int) -> tuple[Puzzle, Draft]:
        random = Random(f"{self.name}/{seed}/{length}/{number}")
        puzzle = self.puzzle(random, length)
        first = 0 if self.haystack.restarts else random.randrange(len(self.haystack.sentences))
        hidden, question = puzzle.hidden, puzzle.question
        return puzzle, Draft(puzzle.description, self.haystack, hidden, question, first, puzzle.in_lines)


def passkey(answer_stub: bool = False, digits: int = 5) -> RetrievalTask:
    """Return the passkey task, with keys of `digits` digits; see `PASSKEY_PROTOCOL`."""

    def puzzle(random: Random, length: int) -> Puzzle:
        key = random_number(random, digits)
        hidden = Hidden(
            prompts.inner_gap(random.random()), f"The passkey is {key}. Remember it. {key} is the passkey.", key
        )
        description = (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will "
            "quiz you about the important information there."
        )
        stub = "The pass key is"  # as in the original prompt
        return Puzzle(description, [hidden], "What is the passkey?", stub, (key,), in_lines=True)

    return RetrievalTask("passkey", puzzle, prompts.FILLER_BLOCKS, answer_stub, passkey_score)


def needle(depth: int, haystack: Haystack, answer_stub: bool = False) -> RetrievalTask:
    """Return the needle task, with the needle after `depth` percent of the sentences; see `NEEDLE_PROTOCOL`."""

    def puzzle(random: Random, length: int) -> Puzzle:
        city, code = random.choice(CITIES), random_number(random, 7)
        hidden = Hidden(prompts.depth_gap(depth / 100), f"The code of {city} is {code}.", code)
        description = (
            "Somewhere in the text below stands the code of a city. Remember it: you will be asked for it after the "
            "text."
        )
        return Puzzle(description, [hidden], f"What is the code of {city}?", f"The code of {city} is", (code,))

    return RetrievalTask(f"needle at {depth}", puzzle, haystack, answer_stub)


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
    """Ask for all variables with one value. The first variable of a chain is set to a value, and each later one to the
    variable before it.
    """
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


RULER_TASKS: dict[str, Callable[[Random, int], Puzzle]] = {
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
}
"""The puzzle of each task. The keys are `task.RULER_NAMES`."""


def ruler(name: str, haystack: Haystack, answer_stub: bool = False) -> RetrievalTask:
    return RetrievalTask(name, RULER_TASKS[name], haystack, answer_stub)


def sample_digest(made: Iterable[RetrievalTask]) -> str:
    """Return a sha256 over one prompt and answer of every task. Other templates or words give another digest.

    Prompts are encoded as bytes, so the digest does not depend on a model. The haystack has a separate digest.
    """
    digest, tokenizer = hashlib.sha256(), load_tokenizer("CharLevelTokenizer")
    for task in sorted(made, key=lambda task: task.name):
        filler = prompts.FILLER_BLOCKS if task.haystack.restarts else Haystack("filler", prompts.FILLER)
        (case,) = replace(task, haystack=filler).make_cases(tokenizer, SAMPLE_LENGTH, 1, seed=0)
        digest.update(f"{task.name} {case.expected}".encode() + case.prompt.tobytes())
    return digest.hexdigest()
