"""What deserves a line: waits for data, stragglers, full memory, lost speed, skipped steps, a loss that is no number.

Each rule is a function of the interval since it was last asked, and one row of `RULES`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

SECONDS_JUDGED = 10.0
"""Training time that a rule about time looks at, at least: shorter ones are noise."""
SECONDS_QUIET = 600.0
"""Training time for which a rule is silent once it has spoken."""
DATA_WAIT = 0.10
STRAGGLER = 1.2
MEMORY = 0.92
DROP = 0.5
MEDIAN_OF = 3
"""Judged intervals that the run's median speed needs before a drop is told."""


class RankTimes(NamedTuple):
    """What one rank sends: seconds waited for data, mean seconds of a forward pass, memory in GiB and as a share."""

    waited: float
    forward: float
    memory_gib: float
    memory_share: float


@dataclass(frozen=True)
class Interval:
    """What is judged: some steps in a row.

    Attributes:
        steps: how many.
        seconds: their training time.
        skipped: steps that changed no weight.
        loss: of the last one.
        ranks: by rank.
        speeds: steps per second of the intervals judged before.
    """

    steps: int
    seconds: float
    skipped: int
    loss: float
    ranks: tuple[RankTimes, ...]
    speeds: tuple[float, ...] = ()

    @property
    def speed(self) -> float:
        """Steps per second."""
        return self.steps / max(self.seconds, 1e-9)

    def __add__(self, later: "Interval") -> "Interval":
        """Both together; forward times are averaged by steps."""
        steps = self.steps + later.steps
        ranks = tuple(
            RankTimes(
                one.waited + two.waited,
                (one.forward * self.steps + two.forward * later.steps) / steps,
                two.memory_gib,
                two.memory_share,
            )
            for one, two in zip(self.ranks, later.ranks, strict=True)
        )
        return replace(
            later, steps=steps, seconds=self.seconds + later.seconds, skipped=self.skipped + later.skipped, ranks=ranks
        )


Hosts = Sequence[str]


def slow_data(found: Interval, hosts: Hosts) -> str | None:
    """A rank whose loop waited for batches."""
    rank, share = _largest([each.waited / max(found.seconds, 1e-9) for each in found.ranks])
    if share <= DATA_WAIT:
        return None
    return f"{share:.0%} of the time goes into waiting for data, on {_place(rank, hosts)}; raise num_workers, or look at the disks"


def straggler(found: Interval, hosts: Hosts) -> str | None:
    """A rank whose forward pass takes longer than those of the others."""
    times = [each.forward for each in found.ranks]
    usual, (rank, longest) = median(times), _largest(times)
    if usual <= 0 or longest <= STRAGGLER * usual:
        return None
    times_slower = f"takes {longest / usual:.2f} times as long as the median of all ranks"
    return f"{_place(rank, hosts)} is slow: a forward pass {times_slower}, which wait for it"


def full_memory(found: Interval, hosts: Hosts) -> str | None:
    """A device that is almost full."""
    rank, share = _largest([each.memory_share for each in found.ranks])
    if share <= MEMORY:
        return None
    used = f"{share:.0%} of the device's memory was in use on {_place(rank, hosts)}"
    return f"{used}; a smaller micro batch or checkpoint_activations leaves room"


def lost_speed(found: Interval, hosts: Hosts) -> str | None:
    """A run that became slow."""
    if len(found.speeds) < MEDIAN_OF or found.speed > DROP * (usual := median(found.speeds)):
        return None
    return f"a step takes {1 / found.speed:.3g} s; the run's median is {1 / usual:.3g} s"


def skipped_steps(found: Interval, hosts: Hosts) -> str | None:
    """Steps that did nothing."""
    return f"{found.skipped} of the last {found.steps} steps changed no weight" if found.skipped else None


def loss_not_finite(found: Interval, hosts: Hosts) -> str | None:
    """A loss that is no number."""
    return None if math.isfinite(found.loss) else f"the loss is {found.loss}"


class Rule(NamedTuple):
    """One kind of oddity; `timed` rules wait for `SECONDS_JUDGED`."""

    find: Callable[[Interval, Hosts], str | None]
    timed: bool


RULES: tuple[Rule, ...] = (
    Rule(loss_not_finite, timed=False),
    Rule(skipped_steps, timed=False),
    Rule(full_memory, timed=False),
    Rule(slow_data, timed=True),
    Rule(straggler, timed=True),
    Rule(lost_speed, timed=True),
)


@dataclass
class Oddities:
    """Asks the rules at every report, and lets none repeat itself within `SECONDS_QUIET`."""

    hosts: Hosts
    _window: Interval | None = None
    _speeds: list[float] = field(default_factory=list)
    _seconds: float = 0.0
    _spoke: dict[Rule, float] = field(default_factory=dict)

    def find(self, found: Interval) -> Iterator[str]:
        """The lines that the newest interval, or those since the last judgement, deserve."""
        self._seconds += found.seconds
        yield from self._ask(found, timed=False)
        self._window = self._window + found if self._window else found
        if self._window.seconds >= SECONDS_JUDGED:
            window, self._window = replace(self._window, speeds=tuple(self._speeds)), None
            yield from self._ask(window, timed=True)
            self._speeds.append(window.speed)

    def _ask(self, found: Interval, timed: bool) -> Iterator[str]:
        for rule in RULES:
            quiet = rule in self._spoke and self._seconds - self._spoke[rule] < SECONDS_QUIET
            line = rule.find(found, self.hosts) if rule.timed == timed and not quiet else None
            if line is not None:
                self._spoke[rule] = self._seconds
                yield line


def _largest(values: Sequence[float]) -> tuple[int, float]:
    """Place and value of the largest."""
    return max(enumerate(values), key=lambda pair: pair[1])


def _place(rank: int, hosts: Hosts) -> str:
    return f"rank {rank} ({hosts[rank]})"
