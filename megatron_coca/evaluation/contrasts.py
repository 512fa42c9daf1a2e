"""Tests of contrasts by their paired differences, and the power of these tests.

Contrasts are tested one by one, in sequence, or with one correction for all of them. A p-value and its interval always
have the same correction. Ablations pair by seed; `megatron-coca stretch` pairs by hidden fact or by document.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.statistics import Estimate, equal, estimate, exponentiated, t_probability, t_quantile

LEVEL = 0.05
"""Level of the tests, which are two-sided."""

Differences = Sequence[float]
"""Paired differences of one contrast: one for each seed, fact or document."""

ContrastVerdict = Literal["holds", "holds in the opposite direction", "does not hold", "cannot be tested", "not tested"]
"""The result of a contrast in a sequence."""


class AnyContrast(Protocol):
    """The expected mean and standard deviation of a contrast's differences, which every kind of plan can declare."""

    @property
    def expected(self) -> float | None: ...

    @property
    def deviation(self) -> float | None: ...


ContrastType = TypeVar("ContrastType", bound=AnyContrast)


# One contrast


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's t test for a mean of 0. There must be at least two values.

    The p-value is 1 if all values are 0. It is NaN if a value is not finite, or if all values are equal and not 0: the
    test would then divide by a standard deviation of 0.
    """
    if not all(map(math.isfinite, values)):
        return math.nan
    if equal([*values, 0.0]):
        return 1.0
    if equal(values):
        return math.nan
    spread, mean = stdev(values) / math.sqrt(len(values)), fmean(values)
    degrees = len(values) - 1
    return 1.0 - t_probability(math.atan(abs(mean) / spread / math.sqrt(degrees)), degrees)


def power(effect: float, count: int, level: float = LEVEL) -> float:
    """Return the power of a two-sided t test of `count` (at least 2) paired values at the significance `level`.

    The population mean is `effect` times the standard deviation sigma. With n = `count`, the sample mean divided by
    sigma / sqrt(n) is normally distributed around effect * sqrt(n). The code integrates over s, the sample standard
    deviation in units of sigma; s * sqrt(degrees) has a chi distribution.
    """
    degrees, normal = count - 1, NormalDist()
    spread = (np.arange(2000) + 0.5) / 2000 * (1.0 + 9.0 / math.sqrt(degrees))
    logarithms = (degrees - 1) * np.log(spread) - degrees * spread**2 / 2
    weights = np.exp(logarithms - logarithms.max())
    needed, centre = t_quantile(degrees, 1.0 - level), effect * math.sqrt(count)
    found = [normal.cdf(centre - needed * s) + normal.cdf(-centre - needed * s) for s in spread.tolist()]
    return float(weights @ found / weights.sum())


def power_of(contrast: AnyContrast, pairs: int | None, level: float = LEVEL, share: float = 1.0) -> float | None:
    """Return the power of a contrast with `pairs` pairs if the true difference is `share` times the expected one.

    Return None if the contrast declares no expected difference or no standard deviation. Also return None if `pairs` is
    below 2 or unknown (None).
    """
    if contrast.expected is None or contrast.deviation is None or pairs is None or pairs < 2:
        return None
    return power(share * contrast.expected / contrast.deviation, pairs, level)


def pairs_needed(differences: Differences, inside: float, wanted: float, most: int) -> float:
    """Return the smallest number of pairs that would show the mean difference with the power `wanted`, or inf.

    The computation uses the mean and the standard deviation of the given differences. The difference is shown if its
    interval at the confidence `inside` excludes 0. The result is inf if more than `most` pairs are needed, if all
    differences are equal, or if one is not finite.
    """
    found = estimate(differences)
    if equal(differences) or not math.isfinite(found.mean):
        return math.inf
    deviation = math.sqrt(math.fsum((each - found.mean) ** 2 for each in differences) / (len(differences) - 1))
    low, high = 1, most + 1  # `low` pairs are too few, `high` pairs are enough
    while high - low > 1:
        middle = (low + high) // 2
        shown = power(found.mean / deviation, middle, 1.0 - inside) >= wanted
        low, high = (low, middle) if shown else (middle, high)
    return high if high <= most else math.inf


def padded(differences: Differences) -> list[float]:
    """Return the differences with two pairs added, one in favour of each side (Bonett and Price 2012).

    The outcomes of a pair are 0 or 1. With the added pairs, an interval exists even if all pairs agree. Its coverage is
    good even for few pairs.
    """
    return [*differences, 1.0, -1.0]


# Several contrasts


def simultaneous(comparisons: float) -> float:
    """Return the confidence that makes all intervals contain their true values in 95% of cases (Bonferroni)."""
    return 1.0 - LEVEL / comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm 1979), in the given order.

    The p-value of an undefined test is NaN. It remains NaN, and counts as a comparison with p = 1.
    """
    pairs = zip(holm_factors(p_values), p_values, strict=True)
    return [math.nan if math.isnan(p) else min(1.0, factor * p) for factor, p in pairs]


def holm_factors(p_values: Sequence[float]) -> list[float]:
    """Return, in the given order, the factors by which Holm's method multiplies p-values before it limits them to 1.

    An interval at a confidence of 1 - 0.05/factor excludes 0 if and only if the corrected p-value is below 0.05.
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]
    factors, largest = [0.0] * len(known), 0.0
    for rank, index in enumerate(sorted(range(len(known)), key=known.__getitem__)):
        count = len(known) - rank
        largest = max(largest, count * known[index])  # a larger p-value never gets a smaller corrected p-value
        factors[index] = largest / known[index] if known[index] > 0 else count
    return factors


class Declared(NamedTuple, Generic[ContrastType]):
    """The result of a contrast that is tested together with other contrasts.

    `difference` is the mean difference; for perplexities, it is the mean difference of their logarithms. `p` is the
    p-value of the two-sided paired t test; `holm` is this p-value corrected for all contrasts. Both are NaN if a
    difference is not finite, or if all are equal and not 0. The interval has the confidence `level`, at which Holm's
    method tests this contrast. So the interval excludes 0 if and only if `holm` is below 5%.
    """

    contrast: ContrastType
    difference: Estimate
    p: float
    holm: float
    level: float

    @property
    def times(self) -> Estimate:
        """The ratio of two perplexities, if `difference` is the difference of their logarithms."""
        return exponentiated(self.difference)


def together(found: Sequence[tuple[ContrastType, Differences]], count: int) -> list[Declared[ContrastType]]:
    """Return the contrasts with at least two differences, with p-values and intervals corrected for all `count`
    contrasts (Holm).
    """
    known = [(contrast, differences) for contrast, differences in found if len(differences) > 1]
    p_values = [p_value(differences) for _, differences in known]
    missing = [1.0] * (count - len(known))  # missing contrasts count, so an unfinished study does not claim more
    corrected, factors = holm(p_values + missing), holm_factors(p_values + missing)
    tested = []
    for (contrast, differences), p, own, factor in zip(known, p_values, corrected, factors, strict=False):
        level = simultaneous(factor)
        tested.append(Declared(contrast, estimate(differences, level), p, own, level))
    return tested


class Step(NamedTuple, Generic[ContrastType]):
    """The result of a contrast in a sequence. With the verdict "not tested", `p` has no meaning."""

    contrast: ContrastType
    difference: Estimate
    p: float
    verdict: ContrastVerdict


def in_sequence(
    found: Sequence[tuple[ContrastType, Differences | None]], either_direction: bool = False
) -> list[Step[ContrastType]]:
    """Test contrasts in the given order at LEVEL, each only if all contrasts before it hold. Return the results.

    If a significant difference is opposite to the expected one, its contrast holds only with `either_direction`. A
    contrast that was not measured has None instead of differences, and ends the sequence.
    """
    steps: list[Step[ContrastType]] = []
    for contrast, differences in found:
        if differences is None:
            steps.append(Step(contrast, Estimate(math.nan, math.nan, math.nan, 0), math.nan, "not tested"))
            continue
        p, difference = p_value(differences), estimate(differences)
        expected = None if either_direction else contrast.expected
        going_on = all(step.verdict == "holds" for step in steps)
        steps.append(Step(contrast, difference, p, verdict_of(expected, difference, p) if going_on else "not tested"))
    return steps


def verdict_of(expected: float | None, difference: Estimate, p: float) -> ContrastVerdict:
    """Return the verdict on a tested difference. If `expected` is None, the contrast holds in either direction."""
    if math.isnan(p):
        return "cannot be tested"
    if p >= LEVEL:
        return "does not hold"
    opposite = expected is not None and expected * difference.mean < 0
    return "holds in the opposite direction" if opposite else "holds"


class ContrastEntry(NamedTuple):
    """A declared contrast of one of many studies, with its paired differences.

    Attributes:
        name: the two sides, for example "CoCA-Slack against RoFormer".
        at: the length as a multiple of the training length.
        quantity: the compared quantity. Its unit is included, except for a share of right answers, which has no unit.
        verdict: the result of the contrast in its own study.
    """

    study: str
    name: str
    at: float
    quantity: str
    differences: Differences
    verdict: str


class Corrected(NamedTuple):
    """An entry with an interval and a p-value that are corrected for the number of all entries.

    With n entries, the interval of `difference` has a confidence of 1 - 5%/n, so that all intervals contain the true
    differences in 95% of cases. `corrected` is n times `p`, at most 1. An interval excludes 0 if and only if its
    `corrected` is below 5%. `p` and `corrected` are NaN if the t test is undefined.
    """

    entry: ContrastEntry
    difference: Estimate
    p: float
    corrected: float

    @property
    def significant(self) -> bool:
        return self.corrected < LEVEL


def corrected_once(entries: Sequence[ContrastEntry]) -> list[Corrected]:
    """Return all entries in the given order, each corrected for the number of entries (Bonferroni).

    Raises EvaluationError if an entry has fewer than two differences: it would be counted but could not be tested.
    """
    short = [f"{entry.study}: {entry.name}" for entry in entries if len(entry.differences) < 2]
    if short:
        raise EvaluationError(f"{short[0]}: fewer than two pairs; leave the study out until it is finished")
    count, found = len(entries), []
    for entry in entries:
        p = p_value(entry.differences)
        found.append(Corrected(entry, estimate(entry.differences, simultaneous(count)), p, min(count * p, 1.0)))
    return found


# Words


SMALLEST_P = 1e-12
"""Smallest p-value that is shown as a number."""


def p_text(p: float) -> str:
    """Return a p-value with two digits, or "undefined" if the t test is undefined.

    Values smaller than 1e-12 become "below 1e-12", because rounding errors of the t distribution are almost as large.
    """
    return "undefined" if math.isnan(p) else "below 1e-12" if p < SMALLEST_P else f"{p:.2g}"


def level_text(level: float) -> str:
    """Return a confidence below 1 as a percentage, such as `95%` or `99.6%`. It has enough digits not to read 100%."""
    texts = (f"{100 * level:.{digits}f}" for digits in range(1, 9))
    return next(text for text in texts if float(text) < 100).removesuffix(".0") + "%"
