"""Axes of plots: their least span, and ticks that label the whole of a logarithmic one."""

import math

from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator, NullLocator

LEAST_RATIO = 1.25
"""Of the ends of an axis, so that a difference of 2% takes at most a tenth of it."""
MOST_TICKS = 10
LARGEST_EXPONENT = 308.0
"""Of a float64."""


def widened(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis for positive values from `low` to `high`: at least LEAST_RATIO apart."""
    if low <= 0 or high >= LEAST_RATIO * low:
        return low, high
    middle, reach = math.sqrt(low) * math.sqrt(high), math.sqrt(LEAST_RATIO)
    return middle / reach, middle * reach


def log_ticks(low: float, high: float) -> list[float]:
    """Round positive numbers from at most `low` to at least `high`: evenly spaced within a factor of 4, else 1, 2 and 5
    times powers of ten, or these powers alone.
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
    """A tick as a label: `0.5`, `20000`, or a formula with a power of ten."""
    if 1e-3 <= tick < 1e5:
        return f"{tick:g}"
    mantissa, exponent = f"{tick:e}".split("e")
    factor = f"{float(mantissa):g}"
    return f"$10^{{{int(exponent)}}}$" if factor == "1" else rf"${factor}\cdot10^{{{int(exponent)}}}$"


def label_log_axis(axis: Axis, low: float, high: float) -> None:
    """Make an axis logarithmic, from a labelled tick below `low` to one above `high`; nothing if they are no range."""
    if not 0 < low <= high < math.inf:
        return
    ticks = log_ticks(*widened(low, high))
    start, end = math.log10(ticks[0]), math.log10(ticks[-1])
    margin = 0.02 * (end - start)
    name = axis.axis_name  # type: ignore[attr-defined]
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (_power(start - margin), _power(end + margin))})
    axis.set_ticks(ticks, labels=list(map(tick_text, ticks)))
    axis.set_minor_locator(NullLocator())
