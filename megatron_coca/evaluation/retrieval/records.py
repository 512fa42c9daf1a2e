"""The result files of `evaluate.py passkey`, `needle` and `ruler`."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.model import DynamicLength
from megatron_coca.tables import format_table


class Tally(Record):
    """Cases counted: `accuracy` is their mean score, `low` .. `high` its 95% Wilson interval."""

    accuracy: float
    correct: int  # cases whose score is 1
    count: int
    low: float
    high: float


class FactRecord(Record):
    """Where something that is asked for stands in a prompt."""

    depth: float  # share of the filler sentences before it, 0 .. 1
    distance: int  # tokens from where it is said first, which counts, to the prompt's end


class CaseRecord(Record):
    """One prompt and what the model said."""

    number: int
    tokens: int  # of the prompt
    facts: list[FactRecord]  # in the order of the text; none where the whole text is the fact
    expected: list[str]
    answer: str  # its first characters
    score: float  # 0 .. 1


class RangeTally(Record):
    """Cases by the distance of what is asked for: above `above`, at most `up_to` tokens from the prompt's end."""

    above: int
    up_to: int
    tally: Tally | None  # None where no case is in the range


class ScoredCell(Tally, Cell):
    """Cases of one kind, and their tally."""

    length: int  # asked for, in tokens; prompts are at most that long
    cases: list[CaseRecord]


class PasskeyCell(ScoredCell):
    """One length. `inside` are cases whose key the model could see in a context of its training length."""

    inside: Tally | None
    beyond: Tally | None
    ranges: list[RangeTally]  # quarters of the length, the nearest first

    @property
    def key(self) -> tuple[int]:
        return (self.length,)


class NeedleCell(ScoredCell):
    """One length and depth."""

    depth: int  # percent of the filler sentences before the needle

    @property
    def key(self) -> tuple[int, int]:
        return (self.length, self.depth)


class RulerCell(ScoredCell):
    """One task and length."""

    task: str

    @property
    def key(self) -> tuple[str, int]:
        return (self.task, self.length)


class HaystackRecord(Record):
    """The text around what is hidden."""

    name: str
    sentences: int  # for the passkey's filler 1: its five sentences are repeated as one block
    sha256: str  # of the sentences, each with a line feed


class RetrievalProtocol(Record):
    """How was measured; which lengths and tasks is in the results."""

    text: str
    cases: int  # of each cell
    max_new_tokens: int
    seed: int
    tokens_per_batch: int
    answer_stub: bool
    haystack: HaystackRecord
    dynamic_length: DynamicLength = "total"  # files written before there was a choice do not say so


class NeedleProtocol(RetrievalProtocol):
    """`depths` in percent."""

    depths: list[int]


class PasskeyResult(Result):
    """Passkey retrieval by length."""

    task: Literal["passkey"] = "passkey"
    protocol: RetrievalProtocol
    results: list[PasskeyCell]


class NeedleResult(Result):
    """A needle in a haystack by length and depth."""

    task: Literal["needle"] = "needle"
    protocol: NeedleProtocol
    results: list[NeedleCell]


class RulerResult(Result):
    """Synthetic tasks by name and length."""

    task: Literal["ruler"] = "ruler"
    protocol: RetrievalProtocol
    results: list[RulerCell]


Z = 1.959963984540054
"""Standard normal quantile at 0.975: intervals hold 95%."""


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` trials (Wilson 1927); it stays within 0 .. 1 and is not empty at either.

    For the mean of scores between 0 and 1 that are not all 0 or 1 it is wider than needed: no other scores of that
    mean vary as much as those that are.
    """
    centre = share + Z**2 / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    low, high = (centre - reach) / scale, (centre + reach) / scale
    # At the ends the formula gives the end, but for rounding.
    return (low if share > 0 else 0.0), (high if share < 1 else 1.0)


def whole_tally(scores: Sequence[float]) -> dict[str, Any]:
    """The fields of the tally of scores between 0 and 1, at least one."""
    accuracy = math.fsum(scores) / len(scores)
    low, high = wilson_interval(accuracy, len(scores))
    correct = sum(score == 1 for score in scores)
    return {"accuracy": accuracy, "correct": correct, "count": len(scores), "low": low, "high": high}


def tally(scores: Sequence[float]) -> Tally | None:
    """The tally of scores between 0 and 1; None where there is none."""
    return Tally(**whole_tally(scores)) if scores else None


RANGES = 4


def passkey_cell(length: int, cases: Sequence[CaseRecord], training_length: int) -> PasskeyCell:
    """All cases, those within and beyond the training length, and those of each quarter of the length."""
    inside = [distance_of(case) <= training_length for case in cases]
    return PasskeyCell(
        **whole_tally([case.score for case in cases]),
        length=length,
        cases=list(cases),
        inside=tally([case.score for case, within in zip(cases, inside, strict=True) if within]),
        beyond=tally([case.score for case, within in zip(cases, inside, strict=True) if not within]),
        ranges=[_range(length * part // RANGES, length * (part + 1) // RANGES, cases) for part in range(RANGES)],
    )


def needle_cell(length: int, depth: int, cases: Sequence[CaseRecord], training_length: int) -> NeedleCell:
    """One length and depth."""
    return NeedleCell(**whole_tally([case.score for case in cases]), length=length, cases=list(cases), depth=depth)


def ruler_cell(task: str, length: int, cases: Sequence[CaseRecord], training_length: int) -> RulerCell:
    """One task and length."""
    return RulerCell(**whole_tally([case.score for case in cases]), length=length, cases=list(cases), task=task)


def distance_of(case: CaseRecord) -> int:
    """Of what is farthest from the end."""
    return max(fact.distance for fact in case.facts)


def _range(above: int, up_to: int, cases: Sequence[CaseRecord]) -> RangeTally:
    scores = [case.score for case in cases if above < distance_of(case) <= up_to]
    return RangeTally(above=above, up_to=up_to, tally=tally(scores))


ABSENT = "-"


def passkey_table(result: PasskeyResult) -> str:
    """Lengths down; accuracy, its interval, and its parts."""
    quarters = [f"quarter {number}" for number in range(1, 5)]
    header = ["length", "prompt tokens", "accuracy", "95% interval", "inside", "beyond", *quarters]
    rows = [
        [
            str(cell.length),
            _tokens(cell),
            f"{cell.accuracy:.2f}",
            f"{cell.low:.2f}-{cell.high:.2f}",
            *(_share(part) for part in (cell.inside, cell.beyond, *(each.tally for each in cell.ranges))),
        ]
        for cell in result.results
    ]
    trained = result.checkpoint.seq_length
    explained = f"inside, beyond: the training length of {trained}; quarters: of the length, by distance from the end"
    seen = dynamic_length_text(result.protocol.dynamic_length)
    title = f"{result.label}: passkey, {result.protocol.cases} cases"
    return f"{title}\n\n{format_table(header, rows)}\n\n{explained}\n{seen}\n"


def needle_table(result: NeedleResult) -> str:
    """Depths down, lengths across."""
    lengths = sorted({cell.length for cell in result.results})
    found = {cell.key: f"{cell.accuracy:.2f}" for cell in result.results}
    rows = [
        [f"{depth}%", *(found.get((length, depth), ABSENT) for length in lengths)] for depth in result.protocol.depths
    ]
    title = f"{result.label}: needle in {result.protocol.haystack.name}, {result.protocol.cases} cases each"
    seen = dynamic_length_text(result.protocol.dynamic_length)
    return f"{title}\n\n{format_table(['depth', *map(str, lengths)], rows)}\n\n{seen}\n"


def ruler_table(result: RulerResult) -> str:
    """Tasks down, lengths across."""
    lengths = sorted({cell.length for cell in result.results})
    found = {cell.key: f"{cell.accuracy:.2f}" for cell in result.results}
    tasks = sorted({cell.task for cell in result.results})
    rows = [[task, *(found.get((task, length), ABSENT) for length in lengths)] for task in tasks]
    title = f"{result.label}: RULER-style tasks, {result.protocol.cases} cases each"
    seen = dynamic_length_text(result.protocol.dynamic_length)
    return f"{title}\n\n{format_table(['task', *map(str, lengths)], rows)}\n\n{seen}\n"


def _tokens(cell: PasskeyCell) -> str:
    """How long the prompts are: they have whole blocks of filler."""
    counts = sorted({case.tokens for case in cell.cases})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"


def _share(part: Tally | None) -> str:
    """Accuracy, and of how many cases."""
    return ABSENT if part is None else f"{part.accuracy:.2f} ({part.count})"
