"""Confidence intervals of fractions and of means over seeds, corrected p-values, and the paired document bootstrap."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

import numpy as np

RESAMPLES = 10_000
"""Number of bootstrap samples of the documents. The seed is fixed, so every comparison uses the same samples."""
FEWEST_DOCUMENTS = 6
"""Fewest documents for a significant difference: with five, all signs agree by chance in 6% of cases."""
ROUNDING = 1e-12
"""Largest difference, relative to the numbers and to 1, that rounding can cause."""


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its interval (95% by default), which are NaN if the `count` values determine none."""

    mean: float
    low: float
    high: float
    count: int


@cache
def t_quantile(degrees: int, inside: float = 0.95) -> float:
    """Return t such that Student's distribution has probability `inside` between -t and t.

    The default is the 0.975 quantile. The degrees of freedom `degrees` must be at least 1. The closed form for whole
    numbers (Abramowitz and Stegun, 26.7.3 and 26.7.4) is inverted by bisection.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom: must be at least 1, not {degrees}; pass at least two values")
    low, high = 0.0, math.pi / 2  # bounds of the angle with tangent t / sqrt(degrees)
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _two_sided(angle, degrees) < inside else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _two_sided(angle: float, degrees: int) -> float:
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

    There is no interval if a value is infinite or NaN, or if all values are equal up to rounding, as in a task that
    every seed solves: the interval would have zero width.
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
    """Return the interval of a fraction of `count` trials (Wilson 1927), which is within 0 .. 1 and never empty.

    `inside` is its confidence. If some scores are neither 0 nor 1, the interval is wider than needed: scores of 0 and
    1 vary most for a given mean.
    """
    z = 1.959963984540054 if inside == 0.95 else NormalDist().inv_cdf(0.5 + inside / 2)
    centre = fraction + z**2 / (2 * count)
    reach = z * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    scale = 1 + z**2 / count
    # For fractions of 0 and 1, rounding would keep the formula from returning exactly 0 or 1.
    low = (centre - reach) / scale if fraction > 0 else 0.0
    high = (centre + reach) / scale if fraction < 1 else 1.0
    return low, high


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test that two or more values have mean 0; 1 if all values are 0.

    Return NaN if a value is not finite, or if all values are equal, but not 0: t would be a number divided by a
    standard deviation of 0.
    """
    if not all(map(math.isfinite, values)):
        return math.nan
    if equal([*values, 0.0]):
        return 1.0
    if equal(values):
        return math.nan
    spread, mean = stdev(values) / math.sqrt(len(values)), fmean(values)
    degrees = len(values) - 1
    return 1.0 - _two_sided(math.atan(abs(mean) / spread / math.sqrt(degrees)), degrees)


def power(effect: float, count: int, level: float = 0.05) -> float:
    """Return the power of a two-sided t test of `count` (at least 2) paired values at the significance `level`.

    The population mean is `effect` times the standard deviation sigma. The sample mean divided by sigma / sqrt(n) is
    normal around effect * sqrt(n). The integral is over s, the sample standard deviation in units of sigma;
    s * sqrt(degrees) has a chi distribution.
    """
    degrees, normal = count - 1, NormalDist()
    spread = (np.arange(2000) + 0.5) / 2000 * (1.0 + 9.0 / math.sqrt(degrees))
    logarithms = (degrees - 1) * np.log(spread) - degrees * spread**2 / 2
    weights = np.exp(logarithms - logarithms.max())
    needed, centre = t_quantile(degrees, 1.0 - level), effect * math.sqrt(count)
    found = [normal.cdf(centre - needed * s) + normal.cdf(-centre - needed * s) for s in spread.tolist()]
    return float(weights @ found / weights.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm 1979), in the given order.

    NaN, of a test that is undefined, stays NaN. It counts as a comparison with p = 1.
    """
    pairs = zip(holm_factors(p_values), p_values, strict=True)
    return [math.nan if math.isnan(p) else min(1.0, factor * p) for factor, p in pairs]


def holm_factors(p_values: Sequence[float]) -> list[float]:
    """Return, in order, the numbers by which Holm's method multiplies the p-values before it limits them to 1.

    An interval at a confidence of 1 - 0.05/factor excludes 0 if and only if the corrected p-value is below 0.05.
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]
    factors, largest = [0.0] * len(known), 0.0
    for rank, index in enumerate(sorted(range(len(known)), key=known.__getitem__)):
        count = len(known) - rank
        largest = max(largest, count * known[index])  # a corrected p-value is at least that of every smaller p-value
        factors[index] = largest / known[index] if known[index] > 0 else count
    return factors


def level_text(level: float) -> str:
    """Return a confidence below 1 in percent, as `95%` or `99.6%`: no digits are rounded to 100%."""
    texts = (f"{100 * level:.{digits}f}" for digits in range(1, 9))
    return next(text for text in texts if float(text) < 100).removesuffix(".0") + "%"


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
    """Return exp(value), or infinity if it overflows: beyond the training length the loss can exceed 709 nats."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def geometric_estimate(logarithms: Sequence[float], inside: float = 0.95) -> Estimate:
    """Return `estimate` with its mean and ends exponentiated; for mean nll values, the results are perplexities."""
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

    `inside` is its confidence. The percentiles of a 95% interval are wider than 2.5% and 97.5% (expanded percentile
    interval, Hesterberg 2015, section 5.3), because the bootstrap's variance is too small by a factor of (n - 1) / n,
    and the tail of a normal distribution is too short.
    """
    count = len(differences)
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile(count - 1, inside))
    low, high = np.quantile(_drawn(count) @ np.asarray(differences, dtype=np.float64), [tail, 1 - tail])
    return float(low), float(high)


def differ(nlls: Sequence[float], others: Sequence[float], inside: float = 0.95) -> bool:
    """Return True if the interval of the difference between two models' nll sums over the same documents excludes 0.

    `inside` is its confidence.
    Both sums would be divided by the same number of tokens, which cannot change the sign of the difference. Return
    False for fewer than FEWEST_DOCUMENTS documents.
    """
    if min(len(nlls), len(others)) < FEWEST_DOCUMENTS:
        return False
    differences = [one - other for one, other in zip(nlls, others, strict=True)]
    if not all(map(math.isfinite, differences)):
        return False
    low, high = bootstrap_interval(differences, inside)
    return low > 0 or high < 0
