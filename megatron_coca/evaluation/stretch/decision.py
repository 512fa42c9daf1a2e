"""Decide which methods are significantly worse than the best one, and choose among the remaining methods.

Methods are compared at the longest length to which any method holds. The number of facts found decides first. If it
does not separate two methods, for example because both find all facts, the margins decide. All differences are paired
by fact.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_coca.evaluation.contrasts import padded, pairs_needed, simultaneous
from megatron_coca.evaluation.statistics import Estimate, equal, estimate
from megatron_coca.evaluation.stretch.choices import simplicity
from megatron_coca.evaluation.stretch.records import HOLDS, StretchResult

LOOKS = 5
"""How many times methods are compared: with 4, 8, 16, 32 and 64 facts."""
FEWEST = 4
"""Methods are compared only if both have this many facts. Fewer facts show too little of their variation."""
POWER = 0.8
"""Power of the comparison that `Compared.needed` assumes."""
MOST_NEEDED = 1000
"""Largest finite value of `Compared.needed`."""
WINDOWS_AGREE = 0.05
"""Largest assumed error of the mean logarithm of a perplexity ratio, even if there is only one window. In
studies/real_model, these logarithms differ between books with standard deviations of 0.02 to 0.04 near the limit."""


class Compared(NamedTuple):
    """The comparison of a method with the leader. Differences are method minus leader.

    Attributes:
        facts: the number of facts that were measured for both methods.
        found: the difference of the shares of facts found, with its interval.
        margin: the mean difference of the margins in nats. A single fact gives no interval.
        by: the quantity that shows that the method is worse: "facts found" or "margin"; "" if undecided.
        needed: the number of facts that would decide; None if it is not known, inf if it is above MOST_NEEDED.
    """

    method: str
    facts: int
    found: Estimate
    margin: Estimate
    by: str
    needed: float | None


class Decision(NamedTuple):
    """The result of the comparison.

    Attributes:
        length: the longest length to which any method holds, in tokens; 0 if no method holds at any length.
        leader: the method that holds to this length and finds the most facts there; "" if no method holds.
        undecided: the leader and the methods that are not significantly worse, in the order of `StretchResult.ranked`.
        chosen: the simplest undecided method that holds to this length; the plain model if no method holds.
        compared: a comparison with the leader for each measured method that may hold to this length.
        unmeasured: the methods that may hold to this length, but were not measured there.
    """

    length: int
    leader: str
    undecided: tuple[str, ...]
    chosen: str
    compared: tuple[Compared, ...] = ()
    unmeasured: tuple[str, ...] = ()


def confidence(result: StretchResult) -> float:
    """Return the confidence of each interval of a difference, corrected for the number of comparisons.

    With it, the probability that the best method is wrongly excluded is at most 5%. Every method except the leader is
    compared LOOKS times. There are two quantities, but only the upper end of an interval can exclude a method. So the
    second quantity needs no further correction.
    """
    return simultaneous(max(1, len(result.supported) - 1) * LOOKS)


def failed(result: StretchResult, method: str, length: int) -> bool:
    """Return True if the measurements show that the method does not hold at this length, or at a shorter one."""
    for each in (each for each in result.lengths() if each <= length):
        ratios = result.loss_ratios(method, each)
        if ratios and not ratio_interval(result, method, each)[0] <= math.log(HOLDS):  # True for NaN, too
            return True
        margins = result.margins(method, each)
        if len(margins) >= FEWEST and _high(margins, confidence(result)) < 0:
            return True
    return False


def ratio_interval(result: StretchResult, method: str, length: int) -> tuple[float, float]:
    """Return the interval of the mean logarithm of the perplexity ratio (`StretchResult.loss_ratios`).

    Each end is at most WINDOWS_AGREE from the mean.
    """
    ratios = result.loss_ratios(method, length)
    mean, within = math.fsum(ratios) / len(ratios), WINDOWS_AGREE
    if len(ratios) >= FEWEST:
        found = estimate(ratios, confidence(result))
        within = min(within, found.high - found.mean) if math.isfinite(found.high) else within
    return mean - within, mean + within


def unclear_perplexity(result: StretchResult, method: str, length: int) -> bool:
    """Return True if the limit HOLDS is within the interval of the perplexity ratio."""
    if not result.loss_ratios(method, length) or (method, length) == (result.plain, result.trained):
        return False
    low, high = ratio_interval(result, method, length)
    return low <= math.log(HOLDS) < high


def decide(result: StretchResult) -> Decision:
    """Compare the methods at the longest length to which any method holds."""
    ranked = result.ranked()
    length = max(map(result.reach, ranked))
    if not length:
        return Decision(0, "", (), result.plain)
    leader = ranked[0]  # among the methods that hold the farthest, the one that finds the most facts there
    hidden = bool(result.facts(leader, length))
    possible = [name for name in ranked if name != leader and not failed(result, name, length)]
    measured = [name for name in possible if result.facts(name, length) or not hidden]
    measured = [name for name in measured if result.windows(name, length)]
    compared = tuple(compare(result, name, leader, length) for name in measured) if hidden else ()
    separated = {each.method for each in compared if each.by}
    undecided = tuple(name for name in (leader, *measured) if name not in separated)
    holding = [name for name in undecided if result.reach(name) == length]
    unmeasured = tuple(name for name in possible if name not in measured)
    return Decision(length, leader, undecided, min(holding, key=simplicity), compared, unmeasured)


def compare(result: StretchResult, method: str, leader: str, length: int) -> Compared:
    """Compare a method with the leader."""
    pairs = list(zip(result.facts(method, length), result.facts(leader, length), strict=False))
    inside = confidence(result)
    found = [float(one.found) - float(other.found) for one, other in pairs]
    margins = [one.margin - other.margin for one, other in pairs]
    by, needed = separated_by(found, margins, inside), None
    if not by and len(pairs) >= FEWEST:
        counted = [padded(found), margins] if math.fsum(found) <= 0 else [padded(found)]
        needed = min(pairs_needed(each, inside, POWER, MOST_NEEDED) for each in counted)
    return Compared(method, len(pairs), difference_of_shares(found, inside), estimate(margins, inside), by, needed)


def difference_of_shares(found: Sequence[float], inside: float) -> Estimate:
    """Return the mean of paired differences between outcomes of 0 or 1. Its interval is limited to -1 .. 1."""
    ends = estimate(padded(found), inside)
    return Estimate(math.fsum(found) / len(found), max(-1.0, ends.low), min(1.0, ends.high), len(found))


def separated_by(found: Sequence[float], margins: Sequence[float], inside: float) -> str:
    """Return the quantity that shows that a method is worse than the leader: "facts found" or "margin"; "" if neither.

    `found` and `margins` are paired differences, method minus leader. A method that finds more facts than the leader is
    not worse, regardless of its margins.
    """
    if len(found) < FEWEST or math.fsum(found) > 0:
        return ""
    return "facts found" if _high(padded(found), inside) < 0 else "margin" if _high(margins, inside) < 0 else ""


MethodAtLength = tuple[str, int]
"""A method and a length in tokens."""


def open_facts(result: StretchResult) -> Iterator[MethodAtLength]:
    """Yield the methods and lengths at which more facts could change the decision.

    These are the undecided methods, and methods that have a mean margin of 0 or less but have not failed. If there is
    only one method, yield all lengths.
    """
    decision, single = decide(result), len(result.supported) == 1
    for length in result.lengths():
        beyond = length == decision.length > result.trained
        contested = decision.undecided if beyond and len(decision.undecided) > 1 else ()
        for name in (name for name in result.supported if result.facts(name, length)):
            margin = result.margin(name, length)
            low = margin is not None and margin <= 0 and not failed(result, name, max(length, decision.length))
            if single or low or name in contested:
                yield name, length


def open_windows(result: StretchResult) -> Iterator[MethodAtLength]:
    """Yield the methods and lengths at which more windows could change the decision.

    There, the limit HOLDS is within the interval of the perplexity ratio, and the method has not failed. The plain
    model at the training length is the reference, so it needs as many windows as any other method. If there is only one
    method, yield all lengths.
    """
    most, reach = result.most_windows, decide(result).length
    for length in result.lengths():
        for name in (name for name in result.supported if result.windows(name, length)):
            behind = (name, length) == (result.plain, result.trained) and result.windows(name, length) < most
            unclear = unclear_perplexity(result, name, length) and not failed(result, name, max(length, reach))
            if behind or unclear or len(result.supported) == 1:
                yield name, length


def _high(values: Sequence[float], inside: float) -> float:
    """Return the upper end of the interval of the mean, or the mean itself if all values are equal."""
    found = estimate(values, inside)
    return found.mean if equal(values) else found.high
