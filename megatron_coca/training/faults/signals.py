"""Preemption: a scheduler's signal is noted, and the loop leaves at the next step, after saving."""

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

from megatron_coca.training.faults.status import Preempted, Unsaved

__all__ = ["SIGNALS", "Preempted", "Preemption", "Unsaved"]

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
