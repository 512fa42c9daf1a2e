"""The watchdog, which ends a hanging process.

This module imports only the standard library, because the process may hang in the import of another library.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from megatron_coca.support.output import STDERR, put
from megatron_coca.training.monitoring.outside_watch import OutsideWatch
from megatron_coca.work.error_report import communicates
from megatron_coca.work.statuses import HUNG

GRACE = 10.0
"""Seconds between a rank's report and its exit. Ranks do not detect a hang at the same moment, and when the first rank
exits, the launcher stops the others, so all ranks must have written their reports by then.
"""
LONGEST_POLL = 1.0


class Heartbeat(NamedTuple):
    """A heartbeat: its number, the point that the run has reached, and the monotonic time."""

    number: int
    reached: str
    at: float


class Watchdog:
    """Exit with status HUNG if `beat` is not called for `timeout` seconds, or if a background job, reported through
    `follow`, makes no progress for that long.

    First, the stacks of all threads are written to standard error and to `hang_rank_<rank>.txt` in `report_folder`,
    with the host, the last heartbeat and the innermost function of the main thread. The stacks show whether a rank
    waits in a collective, or whether the other ranks wait for it. If the process makes progress within `GRACE` seconds,
    it continues.

    The watchdog is a daemon thread, which needs the GIL. C code that never releases the GIL blocks it, too; in this
    case, 3 times GRACE later, a child process (`OutsideWatch`) ends this process by SIGALRM, and faulthandler writes
    the stacks to standard error.

    The time in which the process is suspended (SIGSTOP, Ctrl-Z, Slurm's suspend) does not count.
    """

    def __init__(
        self,
        timeout: float | None,
        report_folder: Path | None,
        rank: int,
        grace: float = GRACE,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`timeout` is in seconds; None disables the watchdog. `end` is called with the exit status."""
        self._timeout, self._folder, self._rank, self._grace, self._end = timeout, report_folder, rank, grace, end
        self._poll = min(LONGEST_POLL, (timeout or LONGEST_POLL) / 4)
        self._main = threading.main_thread().ident
        self._beats: dict[str, Heartbeat | None] = {"main": Heartbeat(0, "start", time.monotonic()), "job": None}
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._outside: OutsideWatch | None = None

    def __enter__(self) -> Self:
        self.beat("start")
        if self._timeout is not None:
            self._outside = OutsideWatch(self._timeout + 3 * self._grace, self._grace, self._rank)
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._outside is not None:
            self._outside.close()

    def beat(self, reached: str) -> None:
        """Record that the run has reached a point, such as "step 12" or "saving". This takes about a microsecond."""
        self._record("main", reached)

    def follow(self, reached: str | None) -> None:
        """Record that a background job has reached a point or, with None, that it has ended."""
        if reached is None:
            self._beats["job"] = None
        else:
            self._record("job", reached)

    def _record(self, kind: str, reached: str) -> None:
        before = self._beats[kind]
        self._beats[kind] = Heartbeat(before.number + 1 if before is not None else 1, reached, time.monotonic())

    def _watch(self) -> None:
        assert self._timeout is not None and self._outside is not None
        before, last, silent = time.monotonic(), dict(self._beats), dict.fromkeys(self._beats, 0.0)
        while not self._over.is_set():
            self._outside.beat()
            self._over.wait(self._poll)
            now = time.monotonic()
            # A suspended process has not hung, so a long gap counts as at most two polls.
            passed, before = min(now - before, 2 * self._poll), now
            for kind, beat in last.items():
                silent[kind] += passed
                if beat is None or self._beats[kind] is not beat:
                    silent[kind], last[kind] = 0.0, self._beats[kind]
                elif silent[kind] >= self._timeout:
                    self._report_and_end(kind, beat)
                    silent[kind] = 0.0

    def _report_and_end(self, kind: str, last: Heartbeat) -> None:
        text = self._describe(last)
        # Separate threads, because a full pipe or a hanging file system must not keep the process alive.
        for write in (self._to_stderr, self._to_folder):
            threading.Thread(target=write, args=(text,), daemon=True).start()
        if self._over.wait(self._grace):
            return
        now = self._beats[kind]
        if now is last:
            self._end(HUNG)
        else:
            progress = f"continues with {now.reached!r}" if now is not None else f"has finished {last.reached!r}"
            self._to_stderr(f"rank {self._rank}: {progress}; increase watchdog_timeout\n")

    def _describe(self, last: Heartbeat) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return (
            f"rank {self._rank} on {socket.gethostname()}: no progress for {time.monotonic() - last.at:.0f} s "
            f"(watchdog_timeout {self._timeout:g}); the last heartbeat was {last.reached!r}, number {last.number}; "
            f"the main thread {_doing(frame)}\n{_all_stacks()}\n"
        )

    def _to_stderr(self, text: str) -> None:
        put(STDERR, text.encode())

    def _to_folder(self, text: str) -> None:
        if self._folder is None:
            return
        path = self._folder / f"hang_rank_{self._rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # in a downloaded folder, this may be a link
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self._to_stderr(f"rank {self._rank}: {path}: cannot be written ({error})\n")


def _doing(frame: FrameType | None) -> str:
    """Describe the innermost function of a thread, and whether the thread waits for other ranks."""
    if frame is None:
        return "has ended"
    waits = "waits for other ranks" if communicates(traceback.walk_stack(frame)) else "is"
    return f"{waits} in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _all_stacks() -> str:
    """Return the stacks of all threads. They are first written to memory, because faulthandler holds the GIL while it
    writes, so it must not write to anything that could block.
    """
    with open(os.memfd_create("stacks"), "w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()
