"""The time left of a stretch."""

from typing import Any, cast

from megatron_coca.evaluation.stretch.running import Goal, Pace, missing_seconds
from tests.unit.evaluation.stretch_cases import LENGTHS, PLAN, stretch_result


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
    loss, retrieval = whole.losses[0], whole.retrieval[0]
    assert loss.seconds == 60 and len(loss.nlls) == PLAN.documents and len(retrieval.cases) == facts[LENGTHS[0]]
    some = loss.model_copy(update={"nlls": loss.nlls[:2]})
    found = retrieval.model_copy(update={"cases": retrieval.cases[:5]})
    part = whole.model_copy(update={"losses": [some, *whole.losses[1:]], "retrieval": [found, *whole.retrieval[1:]]})
    # 30 s for each document so far, and a second for each case
    assert left(part, facts) == 30 * (PLAN.documents - 2) + facts[LENGTHS[0]] - 5
    none = whole.model_copy(update={"losses": whole.losses[1:], "retrieval": whole.retrieval[1:]})
    assert left(none, facts) == PLAN.documents + facts[LENGTHS[0]]
