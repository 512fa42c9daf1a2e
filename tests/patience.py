"""Time limits of tests on slow and busy machines.

A limit says how long a test waits before it fails, so it must hold on the slowest machine that runs the tests. Limits
are chosen on two quiet cores. `patience` multiplies them by the slowness of this machine, measured once per process.
"""

import statistics
import time
from functools import cache

QUIET = 0.030
"""Seconds that `_work` takes on a quiet core of the machine on which the limits were chosen (AMD EPYC, Python 3.11)."""
LARGEST = 10.0
"""The largest factor: a test that hangs should still end."""
ROUNDS = 5


def _work() -> float:
    """Return the wall time in seconds of a loop, which includes the time in which other processes had the core."""
    start = time.perf_counter()
    sum(range(1_500_000))
    return time.perf_counter() - start


@cache
def slowness() -> float:
    """Return how many times slower than the quiet machine this one is now, from 1 to `LARGEST`."""
    return factor(statistics.median(_work() for _ in range(ROUNDS)))


def factor(seconds: float) -> float:
    """Return the factor on limits if `_work` takes `seconds`."""
    return min(max(seconds / QUIET, 1.0), LARGEST)


def patience(seconds: float) -> float:
    """Return a time limit in seconds that is `seconds` on two quiet cores."""
    return seconds * slowness()
