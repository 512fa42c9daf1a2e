"""Supervise the processes of a run on a host: forward signals, stop all when one fails.

DeepSpeed's launcher and torchrun stop their processes on a signal and return an exit status of their own. Here the
processes receive the signal, have time to save, and the exit status of the run is theirs.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from megatron_coca.support.regular_files import open_to_append
from megatron_coca.training.exit_status import (
    DONE,
    INTERRUPTED,
    PREEMPTED,
    SIGNALS,
    UNSAVED,
    CaughtSignals,
)
from megatron_coca.training.watchdog import ERROR_FILE, ErrorReport

FORWARDED = (*SIGNALS, signal.SIGINT)
SETTLE = 5.0
"""Seconds the other processes have to end after one failed: long enough to print their own errors."""
PREEMPTED_SETTLE = 300.0
"""The same if the first one ended because it was asked to: the others may still be saving."""
NAMED = 4
"""Ranks listed by name when many report the same error."""
INTERVAL = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LocalProcess:
    """A child process in its own session that is killed when this process dies.

    The terminal's Ctrl-C does not reach it, so it receives every signal exactly once, through `send`. `translated` maps
    signals that mean something else to this command. With `reports` it can write its error to a file in memory, which
    lasts as long as this process. Its output is appended to `log`, if given.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        translated: Mapping[int, int] | None = None,
        reports: bool = False,
        log: Path | None = None,
    ) -> None:
        self.label, self._translated = label, dict(translated or {})
        prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
        self._error = open(os.memfd_create("error"), "rb") if reports else None  # noqa: SIM115 - open as long as this
        variables = dict(environment)
        if self._error is not None:
            variables[ERROR_FILE] = f"/proc/{parent}/fd/{self._error.fileno()}"

        def die_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(INTERRUPTED)

        with nullcontext() if log is None else open_to_append(log) as output:
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - it takes no lock that another thread could hold
            )

    def poll(self) -> int | None:
        """The exit status (128 + n after signal n), or None while the process runs."""
        status = self.process.poll()
        return 128 - status if status is not None and status < 0 else status

    def send(self, number: int) -> None:
        """Send a signal; SIGKILL goes to the whole process group."""
        if self.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(self._translated.get(number, number))

    def report(self) -> ErrorReport | None:
        """The error that the process wrote, or None if it wrote none."""
        return None if self._error is None else ErrorReport.read(Path(f"/proc/self/fd/{self._error.fileno()}"))


def supervise(processes: Sequence[LocalProcess], signals: CaughtSignals, settle: float = SETTLE) -> int:
    """Wait for all processes and return the exit status of the run: 0, or that of the process that failed first.

    Signals are forwarded without a time limit: the scheduler that sent one has its own. A second Ctrl-C kills the
    processes. Unless a process failed, the status is INTERRUPTED after Ctrl-C, and PREEMPTED after other signals. After
    a failure the others have `settle` seconds before they are killed. The first error is printed in full, the others in
    one line each.
    """
    running, sent, status, heaviest = list(processes), list[int](), DONE, 0
    deadline, shown = math.inf, None
    while running:
        for number in signals.take():
            kill = number == signal.SIGINT and number in sent
            sent.append(signal.SIGKILL if kill else number)
            for process in running:
                process.send(sent[-1])
        ended = {process.label: code for process in running if (code := process.poll()) is not None}
        running = [process for process in running if process.label not in ended]
        # If several ended at once, one that was killed by a signal caused the others to end.
        for label, code in sorted(ended.items(), key=lambda item: -item[1]):
            # A process that has no handler yet dies of the stop signal, and loses nothing.
            asked = code == PREEMPTED or (bool(sent) and (code == INTERRUPTED or code - 128 in sent))
            if asked:
                code = INTERRUPTED if signal.SIGINT in sent else PREEMPTED
            # A failure has priority over a requested end. If only one rank is interrupted, it makes the others fail.
            weight = 0 if code == DONE else 1 if asked else 3 if code == INTERRUPTED else 2
            if weight <= heaviest:
                continue
            status, heaviest = code, weight
            deadline = time.monotonic() + (PREEMPTED_SETTLE if asked else settle)
            if weight == 2 and code != UNSAVED:
                _print_error(f"{label} {describe(code)}{'; stopping the others' if running else ''}")
            shown = shown or _show_first_error(_reports(processes, running), finished=False)
        if time.monotonic() > deadline:
            deadline = math.inf
            for process in running:
                process.send(signal.SIGKILL)
        if running:
            time.sleep(INTERVAL)
    reports = _reports(processes, running)
    shown = shown or _show_first_error(reports, finished=True)
    labels_by_error: dict[str, list[str]] = {}
    for label, report in reports.items():
        # Tracebacks of one error in all ranks differ at most in rank numbers.
        if shown is None or shown.summary != report.summary:
            labels_by_error.setdefault(report.summary, []).append(label)
    for summary, labels in labels_by_error.items():
        more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
        _print_error(f"{', '.join(labels[:NAMED])}{more}: {summary}")
    return status


def _reports(processes: Sequence[LocalProcess], running: Sequence[LocalProcess]) -> dict[str, ErrorReport]:
    """The errors of the processes that ended, by label."""
    ended = [process for process in processes if process not in running]
    return {process.label: report for process in ended if (report := process.report()) is not None}


def _show_first_error(reports: Mapping[str, ErrorReport], finished: bool) -> ErrorReport | None:
    """Print the first error in full and return it. An error of a collective follows from another rank's error, so it
    counts only when the run is over and there is no other.
    """
    first = min(reports, key=lambda label: (reports[label].communication, reports[label].time), default=None)
    if first is None or (reports[first].communication and not finished):
        return None
    heading = f"the first error, of {first}:\n" if reports[first].traceback else ""
    _print_error(f"{heading}{reports[first].text.rstrip()}")
    return reports[first]


def describe(status: int) -> str:
    """Describe an exit status."""
    if status <= 128 or status - 128 not in {int(number) for number in signal.Signals}:
        return f"ended with exit status {status}"
    name = signal.Signals(status - 128).name
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint} (exit status {status})"


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
