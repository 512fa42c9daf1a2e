"""The kinds of events of a soak, and the plan of each launch, which follows from the seed and its number."""

import errno
import math
import random
import signal
from collections.abc import Sequence
from typing import NamedTuple

from megatron_coca.work.statuses import EXIT_STATUSES, INTERRUPTED, PREEMPTED, UNUSABLE
from tests.soak.shim import READS, WRITES

FIXED, ELASTIC = "fixed", "elastic"
"""The two runs: one keeps its layout, the other changes it."""
LAYOUTS = tuple((ranks, stage) for ranks in (1, 2) for stage in range(4))
"""Processes and ZeRO stage."""
LAUNCHES_OF_A_LAYOUT = 3
"""Consecutive numbers of launches that share a layout, so that the same layout is resumed too."""

STOPPED = frozenset({PREEMPTED, -signal.SIGTERM})
"""What ends a launch that its event did not end: SIGTERM; a process that loads its libraries ends by the signal."""
AWAY = frozenset({status for status in EXIT_STATUSES if status not in (0, 1, UNUSABLE)} - {76, 77, 78, 79})
"""After a service was away: whatever lets a scheduler start the run again."""


class Kind(NamedTuple):
    """A kind of event.

    Attributes:
        title: for the table.
        statuses: exit statuses of the launch that docs/faults.md allows besides `STOPPED`.
        runs: those that it happens to.
        number: of a signal that is sent; 0 for none.
        to: whom the signal is sent to: all ranks, the launching process, one rank of it, or a process of an evaluation.
        classes, error: of the file operations that fail; error 0 with classes kills at one.
    """

    title: str
    statuses: frozenset[int] = frozenset()
    runs: tuple[str, ...] = (FIXED, ELASTIC)
    number: int = 0
    to: str = "ranks"
    classes: int = 0
    error: int = 0


def _signal(number: int, *statuses: int) -> Kind:
    return Kind(f"{signal.Signals(number).name} to all ranks", frozenset({-number, *statuses}), number=number)


def _launcher(number: int, *statuses: int) -> Kind:
    title = f"{signal.Signals(number).name} to the launching process"
    return Kind(title, frozenset(statuses), (ELASTIC,), number, "launcher")


def _files(title: str, classes: int, error: int) -> Kind:
    return Kind(title, frozenset({UNUSABLE}), classes=classes, error=error)


CLOCK, SUSPEND, OUTAGE, CACHE, CHANGE, EVALUATE = "clock", "suspend", "outage", "cache", "elastic", "evaluate"
KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL of all ranks", frozenset({-signal.SIGKILL}), number=signal.SIGKILL),
    "kill-io": Kind("SIGKILL at a file operation of a save", frozenset({-signal.SIGKILL}), classes=WRITES),
    "kill-rank": Kind("SIGKILL of one rank", frozenset({137}), (ELASTIC,), signal.SIGKILL, "rank"),
    "kill-launcher": _launcher(signal.SIGKILL, -signal.SIGKILL),
    "term": _signal(signal.SIGTERM, PREEMPTED),
    "usr1": _signal(signal.SIGUSR1, PREEMPTED),
    "hup": _signal(signal.SIGHUP, PREEMPTED),
    "int": _signal(signal.SIGINT, INTERRUPTED),
    "term-launcher": _launcher(signal.SIGTERM, PREEMPTED),
    "usr1-launcher": _launcher(signal.SIGUSR1, PREEMPTED),
    "int-launcher": _launcher(signal.SIGINT, INTERRUPTED),
    "enospc": _files("full disk (ENOSPC)", WRITES, errno.ENOSPC),
    "eio": _files("I/O error (EIO) while writing", WRITES, errno.EIO),
    "eio-read": _files("I/O error (EIO) while reading", READS, errno.EIO),
    SUSPEND: Kind("suspended (SIGSTOP, SIGCONT)"),
    CLOCK: Kind("wall clock jumps"),
    OUTAGE: Kind("object store is away", AWAY | {-signal.SIGKILL}, (FIXED,)),
    CACHE: Kind("local cache deleted or stale", runs=(FIXED,)),
    EVALUATE: Kind(
        "SIGKILL during an evaluation with --jobs", frozenset({0, -signal.SIGKILL}), (ELASTIC,), to="workers"
    ),
    CHANGE: Kind("other number of processes or ZeRO stage", runs=(ELASTIC,)),
}
STORE_KINDS = (OUTAGE, CACHE)
"""Those that need an object store."""


class Plan(NamedTuple):
    """What happens to one launch.

    Attributes:
        number: of the launch, counted from 1.
        run: FIXED or ELASTIC.
        ranks, stage: the layout.
        kind: a key of `KINDS`.
        training: whether times are counted from the first step of the launch; else from its start. In seconds.
        moment: of a signal, of the suspension, or of the outage's beginning.
        length: of the suspension or outage.
        visit: number of the first file operation that fails.
        count: how many fail; None for all from then on.
        cut: SIGKILL ends the launch while the store is away.
        stale: the cache is replaced by an old one, not deleted; of an evaluation one process is killed, not all.
        jumps: moments at which the wall clock is set, and its distance from the real one in seconds.
        stop: when SIGTERM ends the launch, if its event has not.
    """

    number: int
    run: str
    ranks: int
    stage: int
    kind: str
    training: bool
    moment: float
    length: float
    visit: int
    count: int | None
    cut: bool
    stale: bool
    jumps: list[tuple[float, float]]
    stop: float

    @property
    def command(self) -> bool:
        """Whether train.py starts the ranks; else they are forked, without a launching process."""
        return KINDS[self.kind].to != "ranks"


IGNORED = 20.0
"""Seconds after which SIGTERM follows another signal that has not ended the launch."""
LONGEST_JUMP = 10 * 365 * 86400.0


def draw(seed: int, number: int, kinds: Sequence[str], scale: float = 1.0) -> Plan:
    """The plan of launch `number`. `scale` multiplies the times that a launch lasts."""
    generator = random.Random(f"{seed}/{number}")
    deck = [kind for kind in kinds if kind != CHANGE]  # each is drawn once before any is drawn again
    random.Random(f"{seed}/deck/{(number - 1) // len(deck)}").shuffle(deck)
    name = deck[(number - 1) % len(deck)]
    kind = KINDS[name]
    run = generator.choice(kind.runs)
    ranks, stage = 1, 0
    if run == ELASTIC:
        block = number // LAUNCHES_OF_A_LAYOUT if CHANGE in kinds else 0
        ranks, stage = random.Random(f"{seed}/layout/{block}").choice(LAYOUTS)
    if kind.to != "ranks":
        ranks = 2
    training = generator.random() < 0.7
    earliest, latest = (0.0, 5.0) if training else (0.3, 6.0) if kind.to == "ranks" else (3.0, 12.0)
    moment = earliest + generator.uniform(0.0, latest - earliest) * scale
    stop = generator.uniform(1.0, 6.0) * scale + (0.0 if training else 3.0 if kind.to == "ranks" else 12.0)
    length = math.exp(generator.uniform(math.log(0.5), math.log(40.0 if name == OUTAGE else 3.0))) * scale
    jumping = CLOCK in kinds and (name == CLOCK or generator.random() < 0.2)
    jumps = [(generator.uniform(0.0, stop), _jump(generator)) for _ in range(generator.randint(1, 4) if jumping else 0)]
    return Plan(
        number,
        run,
        ranks,
        stage,
        name,
        training,
        moment,
        length,
        visit=int(math.exp(generator.uniform(0.0, math.log(400.0)))),
        count=generator.choice([1, 1, 3, None]),
        cut=name == OUTAGE and generator.random() < 0.4,
        stale=generator.random() < 0.5,
        jumps=sorted(jumps),
        stop=moment + length + 2.0 if name in (SUSPEND, OUTAGE) else moment + IGNORED if kind.number else stop,
    )


def _jump(generator: random.Random) -> float:
    """Seconds between one and ten years, forward or back, or 0: the clock is set right."""
    size = math.exp(generator.uniform(0.0, math.log(LONGEST_JUMP)))
    return generator.choice([-size, size, 0.0])
