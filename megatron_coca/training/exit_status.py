"""Preemption: a scheduler's signal is noted, and the loop leaves at the next step, after saving."""

import os
import signal
import threading
from types import FrameType
from typing import Any, NamedTuple, Self

DONE = 0
FAILED = 1
UNUSABLE = 2
PREEMPTED = 75
HUNG = 76
DIVERGED = 77
UNSAVED = 78
UNJOINED = 79
INTERRUPTED = 130


class ExitStatus(NamedTuple):
    """What a status says, and what whoever started the run should do."""

    meaning: str
    remedy: str


EXIT_STATUSES: dict[int, ExitStatus] = {
    DONE: ExitStatus("the last step is reached and saved", "nothing"),
    FAILED: ExitStatus("a fault of the program or of the machine, with a traceback", "read it; resume"),
    UNUSABLE: ExitStatus("input that cannot be used, or files that cannot be written", "follow the message"),
    PREEMPTED: ExitStatus("asked to leave by a signal, and saved", "requeue: the same command resumes"),
    HUNG: ExitStatus("no progress for `watchdog_timeout` seconds", "read the stacks; resume"),
    DIVERGED: ExitStatus("too many bad steps, by the policies for them", "look at data and learning rate"),
    UNSAVED: ExitStatus("asked to leave by a signal, and nothing is saved", "set `save`; the same command begins anew"),
    UNJOINED: ExitStatus(
        "some processes did not join within `join_timeout`", "see which ones, and their hosts; run again"
    ),
    INTERRUPTED: ExitStatus("Ctrl-C", "resume from the newest checkpoint"),
}
"""Every status with which a training process ends by itself. 75 is EX_TEMPFAIL of sysexits.h: try again later."""


class Stopped(Exception):
    """A run ends before its last step, in good order.

    Attributes:
        status: the exit status that says so.
    """

    status = FAILED


class Preempted(Stopped):
    """A signal asked the run to leave; it has saved."""

    status = PREEMPTED


class Unsaved(Stopped):
    """A signal asked the run to leave, and it has no `save` folder: requeued, it would begin anew for ever."""

    status = UNSAVED


class Diverged(Stopped):
    """The loss guard stopped the run; the message says which steps were bad."""

    status = DIVERGED


class NotJoined(Stopped):
    """Some processes did not come when the run began; the message says which."""

    status = UNJOINED


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What schedulers send before they take the machine away: SIGTERM by default, SIGUSR1 by Slurm's `--signal`; and SIGHUP,
which says that the terminal or the connection is gone.
"""


class Preemption:
    """Notes the signals of `SIGNALS` while it is entered, and restores their handlers afterwards.

    A signal interrupts nothing, so a second one during a save does no harm. One that is ignored
    stays so (SIGHUP under nohup). SIGINT is left alone: it goes on raising
    KeyboardInterrupt. Entered in another thread than the main one it notes nothing, because Python gives handlers to
    the main thread only.

    Attributes:
        requested: the name of the first signal that came, for example "SIGTERM", or None.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set by Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked worker inherits the handler but has no loop that would look: let it end, as its parent expects.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = self.requested or signal.Signals(number).name
