"""Confidence intervals of shares and means, and the bootstrap over documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

import numpy as np

RESAMPLES = 10_000
"""Number of bootstrap samples of the documents. The seed is fixed, so every comparison uses the same samples."""
FEWEST_DOCUMENTS = 6
"""Fewest documents for a significant difference: five differences all have the same sign by chance in 6% of cases."""
ROUNDING = 1e-12
"""Largest difference that rounding can cause, as a multiple of the larger number or of 1."""


@dataclass(frozen=True)
class Estimate:
    """A mean of `count` values and the ends of its interval. The ends are NaN if the values determine no interval."""

    mean: float
    low: float
    high: float
    count: int


@cache
def t_quantile(degrees: int, inside: float = 0.95) -> float:
    """Return t such that Student's distribution has probability `inside` between -t and t.

    By default, t is the 0.975 quantile. The degrees of freedom `degrees` must be at least 1. The closed form for whole
    numbers (Abramowitz and Stegun, 26.7.3 and 26.7.4) is inverted by bisection.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom: must be at least 1, not {degrees}; pass at least two values")
    low, high = 0.0, math.pi / 2  # bounds of the angle with tangent t / sqrt(degrees)
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if t_probability(angle, degrees) < inside else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def t_probability(angle: float, degrees: int) -> float:
    """Return the probability between -t and t in Student's distribution, where t = sqrt(degrees) * tan(angle)."""
    odd, cosine = degrees % 2, math.cos(angle)
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def estimate(values: Sequence[float], inside: float = 0.95) -> Estimate:
    """Return the mean of the values of one or more seeds, with its t interval at the confidence `inside`.

    There is no interval if a value is infinite or NaN, or if all values are equal up to rounding, because the interval
    would have zero width. Values are equal in a task that every seed solves.
    """
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values), math.nan, math.nan, len(values))
    mean = fmean(values)
    if equal(values):
        return Estimate(mean, math.nan, math.nan, len(values))
    reach = t_quantile(len(values) - 1, inside) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach, len(values))


def equal(values: Sequence[float]) -> bool:
    """Return True if the values differ only by rounding, so that their standard deviation means nothing."""
    return math.isclose(min(values), max(values), rel_tol=ROUNDING, abs_tol=ROUNDING)


def wilson_interval(fraction: float, count: int, inside: float = 0.95) -> tuple[float, float]:
    """Return the interval of a fraction of `count` trials (Wilson 1927), with the confidence `inside`.

    The interval is within 0 .. 1 and never empty. If some scores are neither 0 nor 1, the interval is wider than
    needed, because scores of 0 and 1 vary most for a given mean.
    """
    z = 1.959963984540054 if inside == 0.95 else NormalDist().inv_cdf(0.5 + inside / 2)
    centre = fraction + z**2 / (2 * count)
    reach = z * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    # For fractions of 0 and 1, rounding would keep the formula from returning exactly 0 or 1.
    low = (centre - reach) / scale if fraction > 0 else 0.0
    high = (centre + reach) / scale if fraction < 1 else 1.0
    return low, high


def difference_interval(one: Estimate, other: Estimate) -> tuple[float, float]:
    """Return the 95% interval of the difference of two independent means, from their intervals.

    The distances between means and interval ends are added in quadrature (Newcombe 1998, method 10, for proportions;
    Zou and Donner 2008 for other estimates).
    """
    difference = one.mean - other.mean
    below = math.hypot(one.mean - one.low, other.high - other.mean)
    above = math.hypot(one.high - one.mean, other.mean - other.low)
    return difference - below, difference + above


def exponential(value: float) -> float:
    """Return exp(value), or infinity if it overflows. Beyond the training length, a loss can exceed 709 nats."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def geometric_estimate(logarithms: Sequence[float], inside: float = 0.95) -> Estimate:
    """Return the geometric mean and its interval from logarithms. For mean nll values, these are perplexities."""
    return exponentiated(estimate(logarithms, inside))


def exponentiated(found: Estimate) -> Estimate:
    """Return the exponentials of a mean of logarithms and of its interval's ends."""
    return Estimate(exponential(found.mean), exponential(found.low), exponential(found.high), found.count)


@cache
def _drawn(documents: int) -> np.ndarray:
    """Return how often each document is in each bootstrap sample, [RESAMPLES, documents] float64."""
    generator = np.random.default_rng(0)
    return generator.multinomial(documents, [1 / documents] * documents, size=RESAMPLES).astype(np.float64)


def bootstrap_interval(differences: Sequence[float], inside: float = 0.95) -> tuple[float, float]:
    """Return the interval of the sum of two or more paired differences, by resampling documents (Efron 1979).

    `inside` is the confidence. A 95% interval ends beyond the percentiles 2.5% and 97.5% (expanded percentile interval,
    Hesterberg 2015, section 5.3). There are two reasons: with n documents, the bootstrap's variance is too small by a
    factor of (n - 1) / n, and the tail of a normal distribution is too short.
    """
    count = len(differences)
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile(count - 1, inside))
    low, high = np.quantile(_drawn(count) @ np.asarray(differences, dtype=np.float64), [tail, 1 - tail])
    return float(low), float(high)


def differ(nlls: Sequence[float], others: Sequence[float], inside: float = 0.95) -> bool:
    """Return True if the interval of the difference between two models' nll sums excludes 0.

    `inside` is the confidence of the interval. If one model has more documents, only those that both have are
    compared. The sums are not divided by the number of tokens, because both models have the same number. Return False
    for fewer than FEWEST_DOCUMENTS documents.
    """
    if min(len(nlls), len(others)) < FEWEST_DOCUMENTS:
        return False
    differences = [one - other for one, other in zip(nlls, others, strict=False)]
    if not all(map(math.isfinite, differences)):
        return False
    low, high = bootstrap_interval(differences, inside)
    return low > 0 or high < 0
