"""Exit statuses of a training process, and preemption by a scheduler's signal."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from megatron_coca.support.errors import FAILED, UNAVAILABLE, UNUSABLE

DONE = 0  # the last step is completed and saved
PREEMPTED = 75  # preempted by a signal, after saving; EX_TEMPFAIL of sysexits.h: try again later
HUNG = 76  # no progress for `watchdog_timeout` seconds
DIVERGED = 77  # too many bad steps, according to the configured policies
UNSAVED = 78  # preempted by a signal, nothing saved
UNJOINED = 79  # some processes did not join within `join_timeout`
INTERRUPTED = 130  # Ctrl-C (SIGINT), after saving if training had begun
EXIT_STATUSES = (DONE, FAILED, UNUSABLE, UNAVAILABLE, PREEMPTED, HUNG, DIVERGED, UNSAVED, UNJOINED, INTERRUPTED)
"""Every exit status of a training process; docs/faults.md describes the remedies."""


class Stopped(Exception):
    """An orderly end of the run before its last step, with the exit status `status`."""

    status = FAILED


class Preempted(Stopped):
    """Preempted by a signal, after saving."""

    status = PREEMPTED


class Unsaved(Stopped):
    """Preempted by a signal without a `save` folder. Each time the job is requeued, the run starts from step 0."""

    status = UNSAVED


class Interrupted(Stopped):
    """Interrupted by Ctrl-C, after saving; a scheduler must not restart the run."""

    status = INTERRUPTED


class Diverged(Stopped):
    """The loss guard stopped the run; the message says which steps were bad."""

    status = DIVERGED


class NotJoined(Stopped):
    """Some processes did not join the run; the message names them."""

    status = UNJOINED


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that end a run: SIGTERM (schedulers' default before preemption), SIGUSR1 (Slurm's `--signal`) and SIGHUP
(sent when a terminal or connection is closed).
"""


class CaughtSignals:
    """Context manager that records signals and restores the previous handlers afterwards.

    A signal does not interrupt anything, so a second signal during a save does no harm. Ignored signals stay ignored
    (SIGHUP under nohup). Outside the main thread, no signals are recorded, because Python allows handlers only there.

    Attributes:
        requested: the name of the first signal received, for example "SIGTERM", or None.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, answer: str | None = None) -> None:
        """`answer` is written to standard error immediately when the first signal arrives."""
        self.requested: str | None = None
        self._answer = answer
        self._signals, self._pending = signals, list[int]()
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def save_on_interrupt(self) -> None:
        """From now on, record SIGINT too; a second SIGINT ends the process at once. Repeated calls have no effect."""
        if self._before and signal.SIGINT not in self._before and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None means a handler that Python did not set and cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def take(self) -> list[int]:
        """Return the signals received since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked worker inherits the handler but never checks `requested`, so let the signal end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._pending.append(number)
        if self.requested is None:
            self.requested = signal.Signals(number).name
            if self._answer is not None:  # `print` is not safe here: the signal may have interrupted it
                os.write(2, f"\n{self.requested}: {self._answer}\n".encode())
