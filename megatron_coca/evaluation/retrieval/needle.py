"""A needle in a haystack: one sentence at a chosen depth of a text of a chosen length."""

from functools import partial
from random import Random

from megatron_coca.evaluation.retrieval.haystack import Haystack, Hidden, depth_gap
from megatron_coca.evaluation.retrieval.puzzles import HiddenTask, Puzzle, number_of
from megatron_coca.evaluation.retrieval.words import CITIES

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
