"""The time left of a stretch."""

from typing import Any, cast

from megatron_coca.evaluation.stretch.running import Goal, Pace, missing_seconds
from tests.unit.evaluation.stretch_cases import LENGTHS, PLAN, changed, entries_of, stretch_result, with_entries


class OneSecond:
    """A second for each input."""

    def forward(self, method: str, tokens: int) -> float:
        return 1.0

    def facts(self, method: str, tokens: int, count: int) -> float:
        return float(count)


def left(result: Any, facts: dict[int, int]) -> float:
    goals = {(name, length): Goal(PLAN.documents, count) for name in PLAN.methods for length, count in facts.items()}
    return missing_seconds(result, cast(Pace, OneSecond()), goals)


def test_the_time_left_falls_within_a_measurement() -> None:
    whole, facts = stretch_result(), {length: PLAN.cases[length / LENGTHS[0]] for length in LENGTHS}
    assert left(whole, facts) == 0
    entry = entries_of(whole)["plain", LENGTHS[0]]
    assert len(entry.nlls) == PLAN.documents and len(entry.cases) == facts[LENGTHS[0]]
    assert whole.window_seconds("plain", LENGTHS[0]) == 60 / PLAN.documents
    part = changed(whole, "plain", LENGTHS[0], nlls=entry.nlls[:2], cases=entry.cases[:5])
    # 30 s for each document so far, and a second for each case
    assert left(part, facts) == 30 * (PLAN.documents - 2) + facts[LENGTHS[0]] - 5
    none = with_entries(whole, {key: each for key, each in entries_of(whole).items() if each is not entry})
    assert left(none, facts) == PLAN.documents + facts[LENGTHS[0]]
