"""The passkey task: a number hidden in filler (Mohtashami and Jaggi 2023; the CoCA paper's table)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from megatron_coca.evaluation.retrieval.cases import (
    Case,
    Encoder,
    Prices,
    case_random,
    facts_of,
    first_run,
    fit,
    share_found,
)
from megatron_coca.evaluation.retrieval.haystack import (
    FILLER_BLOCKS,
    Haystack,
    HaystackDraft,
    Hidden,
    depth_gap,
    inner_gap,
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CITIES = _words(
    """
    Lisbon Oslo Vienna Cairo Lima Nairobi Dublin Prague Athens Seoul Quito Helsinki Warsaw Madrid Tokyo Havana Riga
    Toronto Geneva Bergen Dakar Hanoi Accra Porto Tunis Zagreb Bogota Jakarta Sydney Boston Delhi Rome
    """
)

ADJECTIVES = _words(
    """
    amber ancient bitter blue bold brave bright broken brown busy calm cheap clean clever cold cool crisp curious
    dark deep distant dry dusty early eager empty faint fair famous fancy fast fierce final flat foreign fresh
    friendly frozen gentle giant glad golden grand gray green happy hard heavy hidden hollow honest huge humble idle
    jolly keen kind large lazy light lively lonely long loud lucky mellow mild misty modern narrow neat new noble
    odd orange pale plain polite proud pure purple quick quiet rapid rare rich rough round royal rusty sad
    sharp shiny silent silver simple sleepy slow small smooth soft solid sour spare steady stern still strange
    strong sudden sunny sweet swift tall tame tender thick thin tidy tiny tired tough vast violet warm wet white
    wide wild wise wooden yellow young
    """
)

NOUNS = _words(
    """
    anchor apple arrow attic badger bakery barrel basket beach bell bench blanket bottle bridge brush bucket button
    cabin camel candle canyon castle cellar chair cherry church circle clock cloud coat comet copper corner cottage
    cradle crane creek curtain desert diamond dolphin door dragon drum eagle engine falcon farmer feather fence
    ferry field flag flute forest fountain fox garden gate glacier glove guitar hammer harbor hill honey horse hotel
    island jacket jewel kettle kitchen ladder lake lantern lemon letter library lion lizard lobster magnet maple
    market meadow mirror monkey mountain museum needle nest ocean olive orchard otter oven owl palace panther paper
    parrot pencil pepper piano pigeon pillow planet pocket pond potato rabbit raven ribbon river robin rocket saddle
    sailor salmon school shadow shelf ship shovel signal spider spoon squirrel stable stone sugar table temple tiger
    tower train trumpet tunnel turtle valley village violin wagon walnut whale wheel whistle window wolf zebra
    """
)

COMPOUNDS = len(ADJECTIVES) * len(NOUNS)

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def compounds(random: Random, count: int) -> list[str]:
    """So many different words such as "quiet-river", at most `COMPOUNDS`."""
    numbers = random.sample(range(COMPOUNDS), count)
    return [f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}" for number in numbers]


def variables(random: Random, count: int) -> list[str]:
    """So many different names of four capital letters."""
    numbers = random.sample(range(26**4), count)
    return ["".join(_LETTERS[number // 26**place % 26] for place in range(4)) for number in numbers]


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


TASK = "Somewhere in the text below stands the code of a city. Remember it: you will be asked for it after the text."
NEEDLE = "The code of {city} is {code}."
QUESTION = "What is the code of {city}?"
STUB = "The code of {city} is"

DIGITS = 7

PROTOCOL = (
    "needle: task, haystack with one needle sentence in the gap between sentences that is nearest to the depth, "
    "question; whole sentences, as many as fit into the length in tokens; city and seven-digit code drawn for each "
    "case; greedy decoding up to the end-of-document token; right if the code stands anywhere in the answer"
)


def needle(depth: int, haystack: Haystack, answer_stub: bool = False) -> HiddenTask:
    """The task at a depth in percent of the sentences; see `PROTOCOL`."""
    return HiddenTask(f"needle at {depth}", partial(compose, depth), haystack, answer_stub)


def compose(depth: int, random: Random, length: int) -> Puzzle:
    """One prompt without its haystack."""
    city, code = random.choice(CITIES), number_of(random, DIGITS)
    hidden = Hidden(depth_gap(depth / 100), NEEDLE.format(city=city, code=code), code)
    return Puzzle(TASK, [hidden], QUESTION.format(city=city), STUB.format(city=city), (code,))


PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
PASSKEY = "The passkey is {key}. Remember it. {key} is the passkey."
PASSKEY_QUESTION = "What is the passkey?"
PASSKEY_STUB = "The pass key is"
"""How the original prompt begins the answer."""

PASSKEY_DIGITS = 5

PASSKEY_PROTOCOL = (
    "passkey: task, filler, passkey, filler, question, one piece a line; each stretch of filler repeats the block of "
    "five sentences whole, with as many blocks as fit into the length in tokens; key uniform in 10000..99999, in any gap "
    "between two blocks alike; greedy decoding up to the end-of-document token; right if the first unbroken run of "
    "exactly five digits in the answer is the key; distance in tokens from the key's first mention to the prompt's end"
)


def passkey(answer_stub: bool = False) -> HiddenTask:
    """The task; see `PROTOCOL`."""
    return HiddenTask("passkey", compose_passkey, FILLER_BLOCKS, answer_stub, score)


def compose_passkey(random: Random, length: int) -> Puzzle:
    """One prompt without its filler."""
    key = number_of(random, PASSKEY_DIGITS)
    hidden = Hidden(inner_gap(random.random()), PASSKEY.format(key=key), key)
    return Puzzle(PASSKEY_TASK, [hidden], PASSKEY_QUESTION, PASSKEY_STUB, (key,), in_lines=True)


def score(answer: str, expected: Sequence[str]) -> float:
    """1 where the first run of five digits is the key, else 0."""
    return float(first_run(answer, PASSKEY_DIGITS) == expected[0])
