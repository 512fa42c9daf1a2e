"""Detect that other processes need the cores on which this process's threads compute.

PyTorch's OpenMP threads spin while they wait for each other, which is slow on crowded cores (docs/speed.md).
"""

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

WINDOW, SLICE = 30.0, 5.0
"""Lengths in seconds. If all slices of a window of at least WINDOW were crowded, the process prints a message. SLICE is
the minimum length of a slice.
"""
LOST = 0.25
"""In a crowded slice, at least this many threads had no core, on average. For two spinning threads on idle cores, the
average was 0.1.
"""
INTERRUPTIONS = 30.0
"""In a crowded slice, at least this many involuntary context switches occurred per second. If the threads got less than
one processor second per second, the switches are counted per processor second.

Two threads had 5 switches per second on two idle cores, 230 to 300 beside a busy process, 100 on a quarter of a core.
"""
INTERRUPTIONS_PER_THREAD = 5.0
"""The limit is at least this number times the number of threads. The operating system itself interrupts every core a
few times per second, which adds up on many cores.
"""
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables. A user who sets one of them knows about spinning, so no message is printed."""


@dataclass(frozen=True)
class Usage:
    """Seconds, processor seconds of all threads, and involuntary context switches, since an arbitrary moment."""

    seconds: float
    used: float
    interruptions: int

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.seconds + other.seconds, self.used + other.used, self.interruptions + other.interruptions)

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(self.seconds - other.seconds, self.used - other.used, self.interruptions - other.interruptions)


def own_usage() -> tuple[float, int]:
    """Return the processor seconds of all threads of this process, and their involuntary context switches."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw


class CrowdedCores:
    """Detects crowded cores. `look` returns a message once.

    A slice is crowded if the threads got less processor time than they could use *and* were interrupted often. One of
    the two conditions is not enough: threads that wait for data or for the main thread also get less time, and a thread
    of this process can interrupt another thread.
    """

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[], tuple[float, int]] = own_usage,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`threads` is the number of threads that compute in parallel. A single thread does not spin, so it gets no
        message.
        """
        self._threads, self._clock, self._usage = threads, clock, usage
        self._silent = threads < 2 or any(name in environment for name in SETTINGS)
        self.restart()

    def restart(self) -> None:
        """Begin a new window."""
        self._begin = self._slice = self._now()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out the time of a `with` block that waits for data or computes with other threads."""
        before = self._now()
        try:
            yield
        finally:
            spent = self._now() - before
            self._begin, self._slice = self._begin + spent, self._slice + spent

    def look(self) -> str | None:
        """Return the message if every slice of the window was crowded, else None. Call this after every step."""
        if self._silent or self._clock() - self._slice.seconds < SLICE:
            return None
        now = self._now()
        if not self._crowded(now - self._slice):
            self.restart()
            return None
        self._slice = now
        window = now - self._begin
        if window.seconds < WINDOW:
            return None
        self._silent = True
        cores, interruptions = window.used / window.seconds, window.interruptions / window.seconds
        return (
            f"busy cores: for {window.seconds:.0f} s, {self._threads} threads ran on {cores:.1f} cores and were "
            f"interrupted {interruptions:.0f} times per second, probably because other processes compute here; set "
            "OMP_WAIT_POLICY=passive before the command (docs/speed.md)"
        )

    def _now(self) -> Usage:
        return Usage(self._clock(), *self._usage())

    def _crowded(self, passed: Usage) -> bool:
        most = max(INTERRUPTIONS, INTERRUPTIONS_PER_THREAD * self._threads)
        missing = self._threads * passed.seconds - passed.used
        return missing >= LOST * passed.seconds and passed.interruptions >= most * min(passed.seconds, passed.used)
