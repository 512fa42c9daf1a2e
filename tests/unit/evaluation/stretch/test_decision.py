"""Which methods the measurements of `megatron-coca stretch` separate, and which one is chosen."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_coca.evaluation.contrasts import LEVEL, power
from megatron_coca.evaluation.stretch import decision
from megatron_coca.evaluation.stretch.choices import CHOICES, simplicity
from megatron_coca.evaluation.stretch.decision import decide, open_facts, open_windows, separated_by
from megatron_coca.evaluation.stretch.records import HOLDS, StretchResult
from megatron_coca.evaluation.tasks.margin.task import CaseMargin
from tests.unit.evaluation.stretch_cases import TRAINED, changed, small_result, with_entries

AT = 2 * TRAINED
Facts = Sequence[tuple[bool, float]]


def facts(found: int, count: int, margin: float, spread: float = 1.0) -> Facts:
    """`count` facts, of which the last `found` are found; the margins alternate around `margin`."""
    return [(number >= count - found, margin + (spread if number % 2 else -spread)) for number in range(count)]


def decided(beyond: Mapping[str, Facts], **more: Any) -> tuple[StretchResult, decision.Decision]:
    result = small_result({name: {AT: given} for name, given in beyond.items()}, **more)
    return result, decide(result)


def test_a_difference_of_one_fact_decides_nothing() -> None:
    """Three facts of four against two, from the page that once named the worse one as the winner."""
    _, found = decided({"rerope+log_n": facts(3, 4, 16.0), "yarn": facts(2, 4, 17.9, 5.0)})
    assert found.length == AT and found.leader == "rerope+log_n"
    assert found.undecided == ("rerope+log_n", "yarn") and found.chosen == "yarn"
    assert found.compared[0].by == "" and found.compared[0].found.mean == -0.25


def test_facts_found_decide_before_margins() -> None:
    given = {"yarn": facts(10, 48, 18.0, 0.1), "rerope": facts(44, 48, 15.0, 0.1)}
    _, found = decided(given)
    assert found.undecided == ("rerope",) == (found.chosen,)
    assert [each.by for each in found.compared] == ["facts found"]


@pytest.mark.parametrize("number", [0, 16])
def test_margins_decide_if_all_or_no_facts_are_found(number: int) -> None:
    _, found = decided({"rerope": facts(number, 16, 5.0, 3.0), "yarn": facts(number, 16, 9.0, 2.0)})
    assert found.undecided == ("yarn",) and [each.by for each in found.compared] == ["margin"]


def test_a_lower_margin_does_not_exclude_a_method_that_finds_more() -> None:
    _, found = decided({"yarn": facts(10, 16, 12.0, 0.1), "rerope": facts(9, 16, 18.0, 0.2)})
    assert found.leader == "yarn" and found.undecided == ("yarn", "rerope") and found.chosen == "rerope"


def test_without_an_extension_is_the_simplest() -> None:
    result, found = decided({"plain": facts(3, 4, 9.0), "yarn": facts(4, 4, 9.0)}, losses={("plain", AT): [3.05]})
    assert result.reach("plain") == AT and found.undecided == ("yarn", "plain") and found.chosen == "plain"
    order = sorted(CHOICES, key=simplicity)
    assert order[:3] == ["plain", "dynamic_yarn", "log_n"] and order.index("lm_infinite") < order.index("pi")


def test_one_window_shows_that_a_perplexity_is_far_too_high() -> None:
    """The plain model has not failed by its one fact, but by its perplexity. An undecided method need not hold."""
    near = {("rerope", AT): [3.0 + math.log(HOLDS) + 0.01], ("plain", AT): [6.0]}
    result, found = decided({name: facts(1, 1, 9.0) for name in ("plain", "yarn", "rerope")}, losses=near)
    assert found.undecided == ("yarn", "rerope") and found.chosen == "yarn", "rerope is simpler, but does not hold"
    assert set(open_windows(result)) == {("rerope", AT)}
    assert set(open_facts(result)) == {("yarn", AT), ("rerope", AT)}


def test_more_facts_are_wanted_only_where_they_can_change_the_decision() -> None:
    result, found = decided({"yarn": facts(40, 48, 15.0), "rerope": facts(2, 48, 1.0), "ntk": facts(38, 48, 15.0)})
    assert found.undecided == ("yarn", "ntk") and set(open_facts(result)) == {("yarn", AT), ("ntk", AT)}
    lone, found = decided({"yarn": facts(40, 48, 15.0), "rerope": facts(2, 48, 1.0)})
    assert found.undecided == ("yarn",) and not set(open_facts(lone)) and not set(open_windows(lone))
    below, _ = decided({"yarn": facts(4, 4, 9.0), "rerope": facts(0, 1, -1.0)})
    assert ("rerope", AT) in set(open_facts(below)), "one fact does not show that a method finds none"
    sure, _ = decided({"yarn": facts(4, 4, 9.0), "rerope": facts(0, 16, -5.0)})
    assert ("rerope", AT) not in set(open_facts(sure)) and decision.failed(sure, "rerope", AT)


def test_a_method_without_a_measurement_is_named() -> None:
    result, found = decided({"yarn": facts(4, 4, 9.0), "rerope": []})
    assert found.undecided == ("yarn",) and found.unmeasured == ("rerope",)
    assert decide(with_entries(result, {})) == decision.Decision(0, "", (), "plain")


def test_the_number_of_facts_that_would_decide_has_the_power() -> None:
    result, found = decided({"yarn": facts(12, 16, 9.0), "rerope": facts(8, 16, 9.0)})
    (each,) = found.compared
    differences = [*[-1.0] * 4, *[0.0] * 12, 1.0, -1.0]
    mean = sum(differences) / 18
    effect = mean / math.sqrt(sum((value - mean) ** 2 for value in differences) / 17)
    assert each.needed is not None and not each.by
    level = 1 - decision.confidence(result)
    assert power(effect, round(each.needed), level) >= decision.POWER > power(effect, round(each.needed) - 1, level)
    _, equal = decided({"yarn": facts(8, 16, 9.0), "rerope": facts(8, 16, 9.0)})
    assert equal.compared[0].needed == math.inf
    _, few = decided({"yarn": facts(2, 2, 9.0), "rerope": facts(1, 2, 9.0)})
    assert few.compared[0].needed is None


def test_all_comparisons_together_seldom_exclude_the_best_method() -> None:
    """Four equal methods, compared with the best one so far at every look, also if most facts are found."""
    inside = 1 - LEVEL / (3 * decision.LOOKS)
    for share in (0.5, 0.9):
        draw, wrong, runs = random.Random(5), 0, 400
        for _ in range(runs):
            hidden = [[draw.random() < share for _ in range(64)] for _ in range(4)]
            margins = [[draw.gauss(0.0, 2.0) for _ in range(64)] for _ in range(4)]
            excluded = False
            for count in (4, 8, 16, 32, 64):
                leader = max(range(4), key=lambda each: (sum(hidden[each][:count]), sum(margins[each][:count])))
                found = [float(one) - other for one, other in zip(hidden[0], hidden[leader], strict=True)]
                nats = [one - other for one, other in zip(margins[0], margins[leader], strict=True)]
                excluded |= bool(leader and separated_by(found[:count], nats[:count], inside))
            wrong += excluded
        assert wrong / runs <= LEVEL


def test_facts_before_a_missing_number_are_compared() -> None:
    """A round that was interrupted has measured some of the later facts."""
    result = small_result({"yarn": {AT: facts(4, 4, 9.0)}})
    late = CaseMargin(task="needle", number=6, tokens=AT, depth=0.5, margin=-9.0, found=False)
    result = changed(result, "yarn", AT, cases=[*result.facts("yarn", AT), late])
    assert len(result.facts("yarn", AT)) == 4 and result.share("yarn", AT) == 1.0


def test_perplexities_of_fewer_windows_follow_from_their_ratio() -> None:
    """The second document is harder for all."""
    result = small_result({}, losses={("plain", TRAINED): [3.0, 5.0], ("yarn", TRAINED): [3.1]})
    perplexity = result.perplexity("yarn", TRAINED)
    assert perplexity == pytest.approx(math.exp(4.1)) and len(result.loss_ratios("yarn", TRAINED)) == 1
    assert result.perplexity("plain", TRAINED) == pytest.approx(math.exp(4.0))
    assert ("plain", TRAINED) not in set(open_windows(result)), "it has the most windows already"
