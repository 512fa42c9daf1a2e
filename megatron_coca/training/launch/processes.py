"""Processes that end together: signals reach all of them, and the failure of one ends the others.

DeepSpeed's launcher and torchrun end their processes when they are told to stop, and give an exit status of their own.
Here the processes are told, have the time to save, and their status is kept.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_coca.training.exit_status import DIVERGED, DONE, INTERRUPTED, PREEMPTED, UNSAVED, UNUSABLE
from megatron_coca.training.watchdog import ERROR_FILE, HangReport

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
FORWARDED = (*STOPPING, signal.SIGINT)
SETTLE = 5.0
"""Seconds that the others have to end by themselves after one has failed: long enough to print their own errors."""
PREEMPTED_SETTLE = 300.0
"""The same where the first one ended with PREEMPTED: the others may still be writing."""
NAMED = 4
"""Processes that are named where many say the same."""
INTERVAL = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Member(Protocol):
    """A process, here or behind a connection; `label` names it in messages."""

    label: str

    def poll(self) -> int | None:
        """Its exit status (128 + n for one that signal n ended), or None while it runs."""
        ...

    def send(self, number: int) -> None:
        """Hand it a signal."""
        ...

    def report(self) -> HangReport | None:
        """What it has told of its end, for the launching process to print; None where it printed that itself."""
        ...


class SignalSource(Protocol):
    """Where requests to stop come from."""

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        ...


class LocalProcess:
    """A process of this host in a session of its own, which a dying parent takes with it.

    The terminal's Ctrl-C does not reach it, so that it gets every signal once: through `send`.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        translated: Mapping[int, int] | None = None,
        error_file: Path | None = None,
    ) -> None:
        """`translated` replaces signals that mean something else to this command; into `error_file` it may write why
        it ends.
        """
        self.label, self._translated, self._error_file = label, dict(translated or {}), error_file
        variables = dict(environment) | ({ERROR_FILE: str(error_file)} if error_file is not None else {})
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

        def die_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(INTERRUPTED)

        self.process = subprocess.Popen(
            command, env=variables, stdin=stdin, start_new_session=True, preexec_fn=die_with_parent
        )

    def poll(self) -> int | None:
        status = self.process.poll()
        return 128 - status if status is not None and status < 0 else status

    def send(self, number: int) -> None:
        if self.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)  # and what it has started
        else:
            self.process.send_signal(self._translated.get(number, number))

    def report(self) -> HangReport | None:
        return None if self._error_file is None else HangReport.read(self._error_file)


class CaughtSignals:
    """The signals that this process gets, in place of their usual effect, from now until `release`.

    Those that are ignored stay so (nohup).

    Attributes:
        came: whether any has come, taken or not.
    """

    def __init__(self) -> None:
        self._caught: list[int] = []
        self.came = False
        heard = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._catch) for number in heard}

    def _catch(self, number: int, frame: object) -> None:
        self._caught.append(number)
        self.came = True

    def take(self) -> list[int]:
        taken, self._caught = self._caught, []
        return taken

    def release(self) -> None:
        """Restore what the signals did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Group:
    """What `supervise` knows while it waits."""

    def __init__(self, members: Sequence[Member], settle: float, first_host: bool) -> None:
        self.members, self.running, self.settle, self.first_host = list(members), list(members), settle, first_host
        self.shown: HangReport | None = None
        self.failures: list[tuple[str, int]] = []
        self.sent: list[int] = []
        self.deadline: float | None = None

    def forward(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            again = number == signal.SIGINT and number in self.sent
            self.sent.append(number)
            for member in self.running:
                member.send(signal.SIGKILL if again else number)

    def collect(self) -> None:
        """Take out who has ended. Of those that ended at once, one that a signal ended is the cause of the others."""
        ended = {member.label: status for member in self.running if (status := member.poll()) is not None}
        self.running = [member for member in self.running if member.label not in ended]
        failed = sorted(((label, status) for label, status in ended.items() if status), key=lambda each: -each[1])
        for label, status in failed:
            self._note(label, PREEMPTED if self._is_asked_for(status) else status)

    def _is_asked_for(self, status: int) -> bool:
        """A process that cannot save yet dies of the signal that asks it to stop; nothing is lost by that."""
        return any(status == 128 + number for number in self.sent if number in STOPPING)

    def _note(self, label: str, status: int) -> None:
        if not self.failures or (status != PREEMPTED and self.status == PREEMPTED):
            self.deadline = time.monotonic() + (PREEMPTED_SETTLE if status == PREEMPTED else self.settle)
            self.failures.insert(0, (label, status))
            if status not in (PREEMPTED, UNSAVED, INTERRUPTED) and status - 128 not in self.sent:
                rest = "; stopping the others" if self.running else ""
                print(f"{label} {describe(status)}{rest}", file=sys.stderr, flush=True)
            self.show_first(over=False)

    def show_first(self, over: bool) -> None:
        """Print the first error: the others are as a rule what follows from it.

        One that was raised while ranks exchanged data is such a consequence itself, so it is printed only when all is
        over and there is no other; on further hosts not even then, because the cause may be on another host.
        """
        if self.shown is not None:
            return
        reports = self._reports()
        first = min(reports, key=lambda label: (reports[label].communication, reports[label].time), default=None)
        if first is None or (reports[first].communication and not (over and self.first_host)):
            return
        self.shown = reports[first]
        heading = f"the first error, of {first}:\n" if self.shown.traceback else ""
        print(f"{heading}{self.shown.text.rstrip()}", file=sys.stderr, flush=True)

    def show_others(self) -> None:
        """Print a line for each further error; the same text of several is printed once."""
        lines: dict[str, list[str]] = {}
        for label, report in self._reports().items():
            # Of one error in all ranks the tracebacks differ at most in numbers of ranks.
            if self.shown is None or self.shown.summary != report.summary:
                lines.setdefault(report.summary, []).append(label)
        for summary, labels in lines.items():
            more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
            print(f"{', '.join(labels[:NAMED])}{more}: {summary}", file=sys.stderr, flush=True)

    def _reports(self) -> dict[str, HangReport]:
        ended = [member for member in self.members if member not in self.running]
        return {member.label: report for member in ended if (report := member.report()) is not None}

    def end_the_late(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            self.deadline = None
            for member in self.running:
                member.send(signal.SIGKILL)

    @property
    def status(self) -> int:
        return self.failures[0][1] if self.failures else 0


def supervise(members: Sequence[Member], signals: SignalSource, settle: float = SETTLE, first_host: bool = True) -> int:
    """Wait for all members and give the run's exit status: 0, or that of the one that failed first.

    Signals are passed on and their effect is waited for, without a limit of time: the scheduler that sent one has its
    own. A second Ctrl-C kills. When a member fails, the others have `settle` seconds, then they are killed. PREEMPTED
    is the status only where nobody failed otherwise.

    The first error is printed whole, the others in a line each. `first_host` is false where others supervise the
    processes of hosts before this one.
    """
    group = _Group(members, settle, first_host)
    while group.running:
        group.forward(signals.take())
        group.collect()
        group.end_the_late()
        if group.running:
            time.sleep(INTERVAL)
    group.show_first(over=True)
    group.show_others()
    return group.status


def describe(status: int) -> str:
    """An exit status in words."""
    if status <= 128 or status - 128 not in {int(number) for number in signal.Signals}:
        return f"ended with exit status {status}"
    name = signal.Signals(status - 128).name
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint} (exit status {status})"


FINAL = frozenset({DONE, UNUSABLE, PREEMPTED, DIVERGED, UNSAVED, INTERRUPTED})
"""Statuses after which a restart would not help, or is not wanted: the end, refusals, signals, and steps that are as bad
the second time. All others are crashes, hangs, killed ranks and hosts that were lost or did not join.
"""
LONGEST_DELAY = 300.0


class Signals(Protocol):
    """Where requests to stop come from."""

    @property
    def came(self) -> bool:
        """Whether any has come so far, taken or not."""
        ...

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        ...


class RestartPolicy(NamedTuple):
    """How often a run is started again.

    Attributes:
        limit: restarts without a new checkpoint in between.
        delay: seconds before the first of them; each further one waits twice as long, at most `LONGEST_DELAY`.
        newest: gives the step of the newest complete checkpoint, 0 where there is none.
    """

    limit: int
    delay: float
    newest: Callable[[], int]


def run_with_restarts(policy: RestartPolicy, run: Callable[[bool], int], signals: Signals) -> int:
    """Run to an end that a restart would not change; returns its exit status, that of the last start.

    `run(again)` runs once; `again` says that it is a restart, which resumes from the newest checkpoint. A checkpoint
    that the run has written since its last start sets the count back to none: it made progress, so that crashes which are
    far apart do not add up.
    """
    used, reached = 0, policy.newest()
    status = run(False)
    while status not in FINAL and not signals.came:
        newest = policy.newest()
        used, reached = (0, newest) if newest > reached else (used, reached)
        if used == policy.limit:
            _say(f"no restart: {used} of {policy.limit} are used without a new checkpoint (max_restarts)")
            return status
        used += 1
        delay = min(policy.delay * 2 ** (used - 1), LONGEST_DELAY)
        where = f"from step {newest}" if newest else "from the start, because nothing is saved yet"
        _say(f"restart {used} of {policy.limit} in {delay:g} s: the run {describe(status)}; it resumes {where}")
        asked = _wait(delay, signals)
        if asked:
            return INTERRUPTED if signal.SIGINT in asked else PREEMPTED
        status = run(True)
    return status


def _wait(seconds: float, signals: Signals) -> list[int]:
    """Wait, or until a signal comes: it ends the run, which has nothing to save."""
    end = time.monotonic() + seconds
    while True:
        taken = signals.take()
        if taken or time.monotonic() >= end:
            return taken
        time.sleep(min(INTERVAL, max(0.0, end - time.monotonic())))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
