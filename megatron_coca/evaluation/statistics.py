"""Intervals of shares and of means over seeds, corrected p-values, and the paired bootstrap over documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev

import numpy as np

RESAMPLES = 10_000
"""Bootstrap samples of the documents. They come from a fixed seed and are the same for every comparison."""
FEWEST_DOCUMENTS = 6
"""Documents below which no difference is called significant: of 5 signs that agree, 6% do so by chance."""


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its 95% interval, NaN where `count` values do not give one."""

    mean: float
    low: float
    high: float
    count: int


@cache
def t_quantile(degrees: int, inside: float = 0.95) -> float:
    """The t for which Student's distribution with that many degrees of freedom (at least 1) is in -t to t with this
    probability: by default the 0.975 quantile.

    Bisection of the closed form for integer degrees: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom {degrees}: must be at least 1")
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _two_sided(angle, degrees) < inside else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _two_sided(angle: float, degrees: int) -> float:
    """Student's probability of values between -t and t, where t = sqrt(degrees) * tan(angle)."""
    odd, cosine = degrees % 2, math.cos(angle)
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value, one for each seed, with its t interval.

    An infinite or undefined value makes the mean so, without an interval. Seeds that agree exactly, as with a task that
    all solve, have none either: it would have no width, whatever their number.
    """
    if not all(map(math.isfinite, values)):
        return Estimate(sum(values), math.nan, math.nan, len(values))
    mean = fmean(values)
    if len(set(values)) < 2:
        return Estimate(mean, math.nan, math.nan, len(values))
    reach = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach, len(values))


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


def p_value(values: Sequence[float]) -> float:
    """The two-sided p-value of Student's t test that the mean of at least two values is 0; 1 if all are 0."""
    spread, mean = stdev(values) / math.sqrt(len(values)), fmean(values)
    if spread == 0.0:
        return float(mean == 0.0)
    degrees = len(values) - 1
    return 1.0 - _two_sided(math.atan(abs(mean) / spread / math.sqrt(degrees)), degrees)


def power(effect: float, count: int, level: float = 0.05) -> float:
    """The probability that the two-sided t test of `count` (at least 2) paired values is significant at `level`, if
    their mean is `effect` times their standard deviation.

    Given the sample's standard deviation s in units of the true one, the mean over sigma / sqrt(n) is normal around
    effect * sqrt(n); the integral is over the distribution of s (a chi distribution over the root of its degrees).
    """
    degrees, normal = count - 1, NormalDist()
    spread = (np.arange(2000) + 0.5) / 2000 * (1.0 + 9.0 / math.sqrt(degrees))
    logarithms = (degrees - 1) * np.log(spread) - degrees * spread**2 / 2
    weights = np.exp(logarithms - logarithms.max())
    needed, centre = t_quantile(degrees, 1.0 - level), effect * math.sqrt(count)
    found = [normal.cdf(centre - needed * s) + normal.cdf(-centre - needed * s) for s in spread.tolist()]
    return float(weights @ found / weights.sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm 1979), in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def difference_interval(one: Estimate, other: Estimate) -> tuple[float, float]:
    """The 95% interval of one mean less another, from those of two independent estimates: the distances to the ends are
    added in quadrature (Newcombe 1998, method 10, for proportions; Zou and Donner 2008 for other estimates).
    """
    difference = one.mean - other.mean
    below = math.hypot(one.mean - one.low, other.high - other.mean)
    above = math.hypot(one.high - one.mean, other.mean - other.low)
    return difference - below, difference + above


def exponential(value: float) -> float:
    """exp(value), infinite where it overflows: beyond the training length a token can cost more than 709 nats."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def geometric_estimate(logarithms: Sequence[float]) -> Estimate:
    """`estimate` of logarithms, its mean and ends as exponentials: of the nll it gives a perplexity."""
    found = estimate(logarithms)
    return Estimate(exponential(found.mean), exponential(found.low), exponential(found.high), found.count)


@cache
def _drawn(documents: int) -> np.ndarray:
    """How often each document is in each bootstrap sample, [RESAMPLES, documents] float64."""
    generator = np.random.default_rng(0)
    return generator.multinomial(documents, [1 / documents] * documents, size=RESAMPLES).astype(np.float64)


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the sum of at least two paired differences, by resampling documents (Efron 1979).

    The percentiles are wider than 2.5% and 97.5%, as of a t interval: the bootstrap's variance is a factor (n - 1) / n
    too small and a normal tail too short (expanded percentile interval, Hesterberg 2015, section 5.3).
    """
    count = len(differences)
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * t_quantile(count - 1))
    low, high = np.quantile(_drawn(count) @ np.asarray(differences, dtype=np.float64), [tail, 1 - tail])
    return float(low), float(high)


def differ(nlls: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two models' sums over the same documents differ: the interval of the difference excludes 0.

    The number of tokens in a sample divides both sums, so it cannot change the sign of the difference. False for fewer
    than FEWEST_DOCUMENTS documents.
    """
    if min(len(nlls), len(others)) < FEWEST_DOCUMENTS:
        return False
    differences = [one - other for one, other in zip(nlls, others, strict=True)]
    if not all(map(math.isfinite, differences)):
        return False
    low, high = bootstrap_interval(differences)
    return low > 0 or high < 0
