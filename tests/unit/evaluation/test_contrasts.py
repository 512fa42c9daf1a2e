"""Tests, corrections and power of contrasts, against SciPy, closed forms and simulation."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from megatron_coca.evaluation.contrasts import (
    LEVEL,
    ContrastEntry,
    corrected_once,
    holm,
    holm_factors,
    in_sequence,
    level_text,
    p_text,
    p_value,
    power,
    power_of,
    simultaneous,
    together,
)
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.statistics import estimate

CLEAR, WEAK, SAME = [0.2, 0.25, 0.3, 0.22], [0.1, 0.3, 0.12, 0.2], [0.5, 0.5, 0.5, 0.5]


@dataclass(frozen=True)
class Planned:
    expected: float | None = 0.2
    deviation: float | None = 0.1


CONTRAST = Planned()


def entry(differences: list[float], name: str = "a against b") -> ContrastEntry:
    return ContrastEntry("study", name, 16, "recall", differences, "holds")


@pytest.mark.parametrize(("effect", "count", "level"), [(1.6, 6, 0.05 / 14), (-0.8, 14, 0.05), (0.0, 2, 0.05)])
def test_power_is_that_of_the_noncentral_t_distribution(effect: float, count: int, level: float) -> None:
    needed, centre = stats.t.ppf(1 - level / 2, count - 1), effect * math.sqrt(count)
    expected = stats.nct.sf(needed, count - 1, centre) + stats.nct.cdf(-needed, count - 1, centre)
    assert power(effect, count, level) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("values", [[1.0, 1.0], [-0.25] * 6, [0.3 - 0.2, 0.4 - 0.3], [1e-3, 1e-3 + 1e-17]])
def test_equal_differences_have_no_t_test(values: list[float]) -> None:
    """Rounding is not a standard deviation: 0.3 - 0.2 and 0.4 - 0.3 are equal."""
    assert math.isnan(p_value(values)) and math.isnan(estimate(values).low)
    assert p_value([0.0 * value for value in values]) == 1.0 == p_value([1e-17, 0.0])
    assert holm([p_value(values), 0.01]) == pytest.approx([math.nan, 0.02], nan_ok=True), "it counts as a comparison"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_differences_that_are_not_finite_have_no_t_test(value: float) -> None:
    assert all(math.isnan(p_value(values)) for values in ([value, 0.1, 0.2], [value] * 3))


def test_p_values_and_their_correction() -> None:
    # t = 2.2281 is the 0.975 quantile for 10 degrees of freedom
    values = np.array([-1.0, 1.0] * 5 + [0.0])
    mean = 2.2281388520 * values.std(ddof=1) / math.sqrt(11)
    assert abs(p_value((values + mean).tolist()) - 0.05) < 1e-6
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []
    assert holm_factors([0.01, 0.04, 0.03, 0.005, 0.0]) == pytest.approx([3, 1.5, 2, 4, 5])


@pytest.mark.parametrize(("given", "level", "effect"), [((24,), LEVEL, 2.0), ((24, 0.01, 0.5), 0.01, 1.0)])
def test_the_power_of_a_contrast_follows_from_what_it_declares(
    given: tuple[float, ...], level: float, effect: float
) -> None:
    assert power_of(CONTRAST, *given) == power(effect, 24, level)  # type: ignore[arg-type]


@pytest.mark.parametrize("pairs", [None, 0, 1])
def test_there_is_no_power_without_two_pairs_or_an_expected_difference(pairs: int | None) -> None:
    assert power_of(CONTRAST, pairs) is None and power_of(Planned(None, None), 24) is None


OPPOSITE, NOISE = [-each for each in CLEAR], [0.2, -0.25, 0.3, -0.1]


@pytest.mark.parametrize(
    ("values", "either_direction", "verdicts"),
    [
        ([CLEAR, OPPOSITE, CLEAR], False, ["holds", "holds in the opposite direction", "not tested"]),
        ([CLEAR, OPPOSITE, CLEAR], True, ["holds", "holds", "holds"]),
        ([CLEAR, NOISE, CLEAR], True, ["holds", "does not hold", "not tested"]),
        ([CLEAR, None, CLEAR], True, ["holds", "not tested", "not tested"]),
        ([SAME, None, CLEAR], False, ["cannot be tested", "not tested", "not tested"]),
        ([[0.3], CLEAR], True, ["cannot be tested", "not tested"]),
    ],
)
def test_a_sequence_ends_at_the_first_contrast_that_does_not_hold_or_is_not_measured(
    values: list[list[float] | None], either_direction: bool, verdicts: list[str]
) -> None:
    steps = in_sequence([(CONTRAST, each) for each in values], either_direction)
    assert [step.verdict for step in steps] == verdicts
    assert [step.difference.count for step in steps] == [len(each or ()) for each in values]
    for step in steps:
        excludes = step.difference.low > 0 or step.difference.high < 0
        assert step.verdict == "not tested" or excludes == step.verdict.startswith("holds")


def test_an_interval_excludes_zero_if_and_only_if_its_corrected_p_value_is_below_5_percent() -> None:
    generator, contrast, sides = random.Random(0), CONTRAST, Counter[bool]()
    for _ in range(200):
        count = generator.randrange(1, 9)
        values = [[generator.gauss(generator.choice((0.0, 1.5)), 1.0) for _ in range(6)] for _ in range(count)]
        for each in together([(contrast, found) for found in values], count + generator.randrange(3)):
            excludes = each.difference.low > 0 or each.difference.high < 0
            assert excludes is (each.holm < LEVEL) and 0.95 <= each.level < 1
            assert (each.times.low > 1 or each.times.high < 1) is excludes
            sides[excludes and each.holm > 1.5 * each.p] += 1
    assert min(sides.values()) > 40


def test_the_interval_and_the_p_value_carry_the_same_correction() -> None:
    alone, among = corrected_once([entry(WEAK)])[0], corrected_once([entry(WEAK), *[entry(CLEAR)] * 4])[0]
    p = stats.ttest_1samp(WEAK, 0).pvalue
    assert alone.corrected == alone.p == pytest.approx(p) and among.corrected == pytest.approx(5 * p)
    assert alone.significant and alone.difference.low > 0
    assert not among.significant and among.difference.low < 0
    level = stats.ttest_1samp(WEAK, 0).confidence_interval(1 - 0.05 / 5)
    assert (among.difference.low, among.difference.high) == pytest.approx(tuple(level))
    for each in corrected_once([entry(CLEAR), entry(WEAK), entry([-value for value in CLEAR])]):
        assert each.significant == (each.difference.low > 0 or each.difference.high < 0)


def test_an_undefined_test_counts_and_is_not_significant() -> None:
    found = corrected_once([entry(SAME), entry(CLEAR)])
    assert math.isnan(found[0].corrected) and not found[0].significant
    assert found[1].corrected == pytest.approx(2 * found[1].p)


def test_a_contrast_without_pairs_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="study: c against d: fewer than two pairs"):
        corrected_once([entry(CLEAR), entry([0.1], "c against d")])


def test_a_p_value_near_rounding_is_not_shown_as_zero() -> None:
    assert [p_text(p) for p in (0.0, 2e-12, math.nan)] == ["below 1e-12", "2e-12", "undefined"]


def test_levels_are_told_apart_from_certainty() -> None:
    levels = [level_text(simultaneous(count)) for count in (1, 2, 14, 66, 500)]
    assert levels == ["95%", "97.5%", "99.6%", "99.9%", "99.99%"]
