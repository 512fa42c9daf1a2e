"""Logarithmic axes with labels at their ends, and places at which labels do not overlap."""

import math
from collections.abc import Sequence

from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator, NullLocator

LEAST_RATIO = 1.25
"""Smallest ratio between the ends of an axis, so that a difference of 2% takes at most a tenth of the axis."""
MOST_TICKS = 10
LARGEST_EXPONENT = 308.0
"""The largest power of ten that float64 can represent."""


def widened(low: float, high: float) -> tuple[float, float]:
    """Return axis ends for positive values from `low` to `high`, with a ratio of at least LEAST_RATIO."""
    if low <= 0 or high >= LEAST_RATIO * low:
        return low, high
    middle, reach = math.sqrt(low) * math.sqrt(high), math.sqrt(LEAST_RATIO)
    return middle / reach, middle * reach


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at round positive values that cover `low` to `high`.

    If `high` is less than 4 times `low`, the ticks are evenly spaced. Otherwise they are 1, 2 and 5 times powers of
    ten, or only powers of ten if there would be too many ticks.
    """
    if high < 4 * low:
        return [float(tick) for tick in MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    fine = [factor * _power(exponent) for exponent in range(first, last) for factor in (1, 2, 5)] + [_power(last)]
    start = max(index for index, tick in enumerate(fine) if tick <= low or index == 0)
    end = min(index for index, tick in enumerate(fine) if tick >= high or index == len(fine) - 1)
    if end - start < MOST_TICKS:
        return fine[start : end + 1]
    step = math.ceil((last - first) / (MOST_TICKS - 1))
    return [_power(exponent) for exponent in range(first, last + step, step)]


def _power(exponent: float) -> float:
    return 10.0 ** min(exponent, LARGEST_EXPONENT)


def tick_text(tick: float) -> str:
    """Return a tick's label: `0.5`, `20000`, or a formula with a power of ten."""
    if 1e-3 <= tick < 1e5:
        return f"{tick:g}"
    mantissa, exponent = f"{tick:e}".split("e")
    factor = f"{float(mantissa):g}"
    return f"$10^{{{int(exponent)}}}$" if factor == "1" else rf"${factor}\cdot10^{{{int(exponent)}}}$"


def label_log_axis(axis: Axis, low: float, high: float) -> None:
    """Make an axis logarithmic, with labelled ticks that cover `low` to `high`. An invalid range changes nothing."""
    if not 0 < low <= high < math.inf:
        return
    ticks = log_ticks(*widened(low, high))
    start, end = math.log10(ticks[0]), math.log10(ticks[-1])
    margin = 0.02 * (end - start)
    name = axis.axis_name  # type: ignore[attr-defined]
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (_power(start - margin), _power(end + margin))})
    axis.set_ticks(ticks, labels=list(map(tick_text, ticks)))
    axis.set_minor_locator(NullLocator())


def spread_apart(places: Sequence[float], halves: Sequence[float]) -> list[float]:
    """Return ascending places between 0 and 1, near the given `places`, at which labels do not overlap.

    `halves` contains half of each label's height. Labels that would overlap form a block around the mean of their
    places.
    """
    blocks: list[tuple[list[int], float]] = []

    def fitted(members: list[int]) -> tuple[list[int], float]:
        """Return a block and its lower end.

        For each label, one lower end of the block puts the label at its given place. The block has the mean of these
        ends, moved so that it lies between 0 and 1.
        """
        size, offset, wanted = 0.0, 0.0, []
        for index in members:
            wanted.append(places[index] - offset - halves[index])
            offset += 2 * halves[index]
        size = offset
        return members, min(max(0.0, math.fsum(wanted) / len(wanted)), max(0.0, 1.0 - size))

    for index in range(len(places)):
        blocks.append(fitted([index]))
        while len(blocks) > 1:
            (before, start), (after, following) = blocks[-2:]
            if start + 2 * math.fsum(halves[each] for each in before) <= following + 1e-9:
                break
            blocks[-2:] = [fitted([*before, *after])]
    found = []
    for members, start in blocks:
        for index in members:
            found.append(start + halves[index])
            start += 2 * halves[index]
    return found
