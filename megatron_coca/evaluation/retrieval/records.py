"""The result files of `evaluate.py passkey`, `needle` and `ruler`, and their console tables."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.model import DynamicLength
from megatron_coca.tables import format_table


class Tally(Record):
    """A number of cases: `accuracy` is their mean score, `low` .. `high` its 95% Wilson interval."""

    accuracy: float
    correct: int  # cases whose score is 1
    count: int
    low: float
    high: float


class FactRecord(Record):
    depth: float  # fraction of the filler units before it, 0 .. 1
    distance: int  # tokens from its first mention to the end of the prompt, both included


class CaseRecord(Record):
    number: int
    tokens: int  # of the prompt
    facts: list[FactRecord]  # in the order of the text; none if the answer is a property of the whole text
    expected: list[str]
    answer: str  # its first 160 characters
    score: float  # 0 .. 1


class RangeTally(Record):
    """Cases whose farthest fact is more than `above` and at most `up_to` tokens from the end of the prompt."""

    above: int
    up_to: int
    tally: Tally | None  # None if no case is in the range


class ScoredCell(Tally, Cell):
    """Cases of one cell and their tally."""

    length: int  # requested tokens; prompts are at most that long
    cases: list[CaseRecord]


class PasskeyCell(ScoredCell):
    """One length. `inside` are cases whose key is within the training length of the end of the prompt."""

    inside: Tally | None
    beyond: Tally | None
    ranges: list[RangeTally]  # quarters of the length, the nearest first

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class NeedleCell(ScoredCell):
    depth: int  # percent of the filler units before the needle

    @property
    def key(self) -> tuple[int, int]:
        return (self.length, self.depth)


class RulerCell(ScoredCell):
    task: str

    @property
    def key(self) -> tuple[str, int]:
        return (self.task, self.length)


class HaystackRecord(Record):
    name: str
    sentences: int  # 1 for the passkey's filler: its five sentences are one unit
    sha256: str  # of the sentences, each with a line feed


class RetrievalProtocol(Record):
    """The options; lengths and tasks are in the results."""

    text: str
    cases: int  # of each cell
    max_new_tokens: int
    seed: int
    tokens_per_batch: int
    answer_stub: bool
    haystack: HaystackRecord
    dynamic_length: DynamicLength = "total"  # the behaviour before the option existed


class NeedleProtocol(RetrievalProtocol):
    depths: list[int]  # percent


class PasskeyResult(Result):
    task: Literal["passkey"] = "passkey"
    protocol: RetrievalProtocol
    results: list[PasskeyCell]


class NeedleResult(Result):
    task: Literal["needle"] = "needle"
    protocol: NeedleProtocol
    results: list[NeedleCell]


class RulerResult(Result):
    task: Literal["ruler"] = "ruler"
    protocol: RetrievalProtocol
    results: list[RulerCell]


RetrievalResult = PasskeyResult | NeedleResult | RulerResult


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a fraction of `count` trials (Wilson 1927); within 0 .. 1, nowhere empty.

    For a mean of scores that are not all 0 or 1 it is wider than needed: no other scores of that mean vary as much.
    """
    z = 1.959963984540054  # standard normal quantile at 0.975
    centre = fraction + z**2 / (2 * count)
    reach = z * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    # At 0 and 1 the formula gives the bound itself only up to rounding.
    low = (centre - reach) / scale if fraction > 0 else 0.0
    high = (centre + reach) / scale if fraction < 1 else 1.0
    return low, high


def tally_fields(scores: Sequence[float]) -> dict[str, Any]:
    accuracy = math.fsum(scores) / len(scores)
    low, high = wilson_interval(accuracy, len(scores))
    correct = sum(score == 1 for score in scores)
    return {"accuracy": accuracy, "correct": correct, "count": len(scores), "low": low, "high": high}


def tally(scores: Sequence[float]) -> Tally | None:
    return Tally(**tally_fields(scores)) if scores else None


def make_cell(task: str, key: tuple[Any, ...], cases: Sequence[CaseRecord], training_length: int) -> ScoredCell:
    """Build the result cell of `evaluate.py TASK` with this key."""
    fields = tally_fields([case.score for case in cases]) | {"cases": list(cases)}
    if task == "needle":
        return NeedleCell(**fields, length=key[0], depth=key[1])
    if task == "ruler":
        return RulerCell(**fields, length=key[1], task=key[0])
    return passkey_cell(key[0], cases, training_length)


def passkey_cell(length: int, cases: Sequence[CaseRecord], training_length: int) -> PasskeyCell:
    scored = [(max(fact.distance for fact in case.facts), case.score) for case in cases]

    def between(above: float, up_to: float) -> Tally | None:
        return tally([score for distance, score in scored if above < distance <= up_to])

    bounds = [length * quarter // 4 for quarter in range(5)]
    return PasskeyCell(
        **tally_fields([case.score for case in cases]),
        length=length,
        cases=list(cases),
        inside=between(0, training_length),
        beyond=between(training_length, math.inf),
        ranges=[RangeTally(above=low, up_to=high, tally=between(low, high)) for low, high in pairwise(bounds)],
    )


def console_table(result: RetrievalResult) -> str:
    """Return lengths as rows for passkeys, and as columns for needles by depth and RULER by task."""
    protocol, seen = result.protocol, dynamic_length_text(result.protocol.dynamic_length)
    if isinstance(result, PasskeyResult):
        quarters = [f"quarter {number}" for number in range(1, 5)]
        header = ["length", "prompt tokens", "accuracy", "95% interval", "inside", "beyond", *quarters]
        rows = [passkey_row(cell) for cell in result.results]
        title = f"{result.label}: passkey, {protocol.cases} cases"
        trained = result.checkpoint.seq_length
        note = f"inside, beyond: the training length of {trained}; quarters: of the length, by distance from the end"
        return f"{title}\n\n{format_table(header, rows)}\n\n{note}\n{seen}\n"
    if isinstance(result, NeedleResult):
        title, corner = f"{result.label}: needle in {protocol.haystack.name}, {protocol.cases} cases each", "depth"
        accuracy = {(f"{cell.depth}%", cell.length): cell.accuracy for cell in result.results}
        names = [f"{depth}%" for depth in result.protocol.depths]
    else:
        title, corner = f"{result.label}: RULER-style tasks, {protocol.cases} cases each", "task"
        accuracy = {(cell.task, cell.length): cell.accuracy for cell in result.results}
        names = sorted({cell.task for cell in result.results})
    lengths = sorted({length for _, length in accuracy})
    rows = [
        [name, *(f"{accuracy[name, length]:.2f}" if (name, length) in accuracy else "-" for length in lengths)]
        for name in names
    ]
    return f"{title}\n\n{format_table([corner, *map(str, lengths)], rows)}\n\n{seen}\n"


def passkey_row(cell: PasskeyCell) -> list[str]:
    tokens = sorted({case.tokens for case in cell.cases})  # prompts have whole blocks of filler
    span = str(tokens[0]) if len(tokens) == 1 else f"{tokens[0]}-{tokens[-1]}"
    tallies = [cell.inside, cell.beyond, *(quarter.tally for quarter in cell.ranges)]
    shown = ["-" if part is None else f"{part.accuracy:.2f} ({part.count})" for part in tallies]
    return [str(cell.length), span, f"{cell.accuracy:.2f}", f"{cell.low:.2f}-{cell.high:.2f}", *shown]
