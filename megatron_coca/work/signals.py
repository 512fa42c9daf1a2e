"""The signals that a scheduler, a terminal or a user sends to a command."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from megatron_coca.support.output import STDERR, put
from megatron_coca.work.statuses import Preempted, Unsaved

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP)
"""Signals that ask a command to save and end. SIGTERM is the default of schedulers. Batch scripts request SIGUSR1 or
SIGUSR2 before a time limit; submitit uses SIGUSR2. SIGXCPU reports a limit of processor time. SIGHUP reports that a
terminal or connection was closed.
"""
FORWARDED = (*PREEMPTION, signal.SIGINT)
"""Signals that a command forwards to its child processes, which are in sessions of their own."""


def heard(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that this process does not ignore. SIGHUP stays ignored under nohup."""
    return [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]


def _install(
    signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> dict[signal.Signals, Any]:
    """Set a handler for the signals that are not ignored, and return the previous handlers. Outside the main thread
    this changes nothing, because Python lets only the main thread set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in heard(signals)}


def _restore(number: signal.Signals, before: Any) -> None:
    # None means a handler that Python did not set and cannot restore.
    signal.signal(number, signal.SIG_DFL if before is None else before)


@contextmanager
def handled(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` for these signals inside the block, except for ignored signals. Outside the main thread this has
    no effect, because Python lets only the main thread set handlers.
    """
    before = _install(signals, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            _restore(number, old)


class CaughtSignals:
    """Context manager that records signals and restores the previous handlers afterwards.

    A signal does not interrupt anything, so a second signal during a save does no harm. Ignored signals stay ignored
    (SIGHUP under nohup). Signals are recorded only in the main thread, because Python allows no handlers elsewhere.

    Attributes:
        requested: the name of the first signal received, for example "SIGTERM", or None.
    """

    def __init__(
        self, signals: Sequence[signal.Signals] = PREEMPTION, answer: str | None = None, last: bool = False
    ) -> None:
        """`answer` is written to standard error immediately when the first signal arrives.

        `last` is True if the process ends after the block. If this or another rank was preempted, the process then
        ignores the signals of `PREEMPTION`, because they may come again. For example, SIGXCPU comes again in every
        second of processor time.
        """
        self.requested: str | None = None
        self._answer, self._last = answer, last
        self._signals, self._pending = signals, list[int]()
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Self:
        self._process = os.getpid()
        self._before = _install(self._signals, self._note)
        return self

    def save_on_interrupt(self) -> None:
        """From now on, record SIGINT too; a second SIGINT ends the process at once. Repeated calls have no effect."""
        if self._before and signal.SIGINT not in self._before and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ends = self._last and (self.requested is not None or isinstance(error, Preempted | Unsaved))
        for number, before in self._before.items():
            _restore(number, signal.SIG_IGN if ends and number in PREEMPTION else before)
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
                put(STDERR, f"\n{self.requested}: {self._answer}\n".encode())
