"""Intervals over seeds and documents, against SciPy, closed forms and simulation."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from megatron_coca.evaluation.statistics import (
    bootstrap_interval,
    differ,
    estimate,
    geometric_estimate,
    t_quantile,
    wilson_interval,
)


def test_quantiles_of_t() -> None:
    for degrees in (*range(1, 40), 99, 100, 1001):
        assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-12)
    with pytest.raises(ValueError, match="at least 1"):
        t_quantile(0)
    assert t_quantile(5, 1 - 0.05 / 14) == pytest.approx(stats.t.ppf(1 - 0.05 / 28, 5), rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_interval_of_a_mean(count: int) -> None:
    values = [random.Random(at).gauss(17.0, 0.4) for at in range(count)]
    found = estimate(values)
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high), rel=1e-12)
    logarithms = [math.log(value) for value in values]
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(logarithms), scale=stats.sem(logarithms))
    expected = (stats.gmean(values), math.exp(low), math.exp(high))
    geometric = geometric_estimate(logarithms)
    assert (geometric.mean, geometric.low, geometric.high) == pytest.approx(expected, rel=1e-12)


def test_values_without_an_interval() -> None:
    assert math.isnan(estimate([2.0]).low) and estimate([2.0]).mean == 2.0
    infinite = estimate([2.0, math.inf])
    assert infinite.mean == math.inf and math.isnan(infinite.low) and infinite.count == 2
    assert math.isnan(estimate([2.0, math.nan]).mean)
    overflown = geometric_estimate([800.0, 810.0])
    assert overflown.mean == math.inf and overflown.high == math.inf


def test_bootstrap_interval_is_that_of_scipy() -> None:
    differences = np.random.default_rng(3).normal(0.1, 1.0, size=30)
    level = 1 - 2 * stats.norm.cdf(-math.sqrt(30 / 29) * stats.t.ppf(0.975, 29))
    expected = stats.bootstrap(
        (differences,), np.mean, method="percentile", confidence_level=level, n_resamples=50_000, rng=1
    )
    interval = expected.confidence_interval
    found = [end / 30 for end in bootstrap_interval(differences.tolist())]
    assert found == pytest.approx([interval.low, interval.high], abs=0.02)
    assert bootstrap_interval([0.5] * 8) == (4.0, 4.0)


@pytest.mark.parametrize(
    ("differences", "significant"),
    [
        ([0.01] * 6, True),
        ([-0.01] * 6, True),
        ([0.01] * 5, False),  # too few documents
        ([0.0] * 20, False),
        ([1.0, -1.0] * 10, False),
        ([1.0] * 19 + [-1.0], True),
        ([1.0] * 19 + [math.inf], False),
    ],
)
def test_known_differences(differences: list[float], significant: bool) -> None:
    others = [100.0 + at for at in range(len(differences))]
    ours = [one + other for one, other in zip(differences, others, strict=True)]
    assert differ(ours, others) is significant


@pytest.mark.slow
@pytest.mark.parametrize(("documents", "most"), [(6, 0.09), (20, 0.07), (100, 0.07)])
def test_false_markers_are_about_one_in_twenty(documents: int, most: float) -> None:
    """Normal differences without and with an effect of three standard errors."""
    generator = np.random.default_rng(11)
    trials = generator.normal(size=(2000, documents))
    rate = np.mean([differ(trial.tolist(), [0.0] * documents) for trial in trials])
    assert 0.03 < rate < most, "four standard errors of 2,000 trials"
    shifted = trials + 3 / math.sqrt(documents)
    power = np.mean([differ(trial.tolist(), [0.0] * documents) for trial in shifted])
    exact = stats.nct.sf(stats.t.ppf(0.975, documents - 1), documents - 1, 3)
    assert power == pytest.approx(exact, abs=0.05), "the t test's"


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        (0.0, 100, 0.0, 0.036993),
        (1.0, 100, 0.963007, 1.0),
        (0.5, 100, 0.403832, 0.596168),
        (0.9, 10, 0.595850, 0.982124),
    ],
)
def test_wilson_intervals(share: float, count: int, low: float, high: float) -> None:
    """The bounds are the shares from which the observed one is 1.96 standard errors away."""
    found = wilson_interval(share, count)
    assert found == pytest.approx((low, high), abs=1e-6)
    assert (found[0] == 0) == (share == 0) and (found[1] == 1) == (share == 1)
    for bound in found:
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / count), rel=1e-6)
