"""From answered cases to the cells of result files."""

from collections.abc import Sequence

from megatron_coca.evaluation.retrieval.records import (
    CaseRecord,
    NeedleCell,
    PasskeyCell,
    RangeTally,
    RulerCell,
)
from megatron_coca.evaluation.retrieval.statistics import tally, whole_tally

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
