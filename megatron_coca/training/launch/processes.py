"""Supervise the processes of a run on a host: forward signals to them, and stop all of them when one fails.

On a signal, DeepSpeed's launcher and torchrun stop their processes and return an exit status of their own. This module
forwards the signal instead, waits while the processes save, and returns their exit status.
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

from megatron_coca.support.processes import exit_status
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
"""Seconds that the other processes have to end after one process failed: enough to print their own errors."""
PREEMPTED_SETTLE = 300.0
"""Seconds that the other processes have to end after one process was preempted: they may still be saving."""
NAMED = 4
"""Maximum number of ranks that are named if many report the same error."""
INTERVAL = 0.05
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LocalProcess:
    """A child process in its own session that is killed when this process dies.

    The terminal's Ctrl-C does not reach the child, so it receives every signal exactly once, through `send`. Signals in
    `translated` are replaced before they are sent, because they have a different meaning for this command. With
    `reports`, the child can write its error to an in-memory file, which exists as long as this process. Its output is
    appended to `log`, if set.
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
        self._error = open(os.memfd_create("error"), "rb") if reports else None  # noqa: SIM115 - open while this exists
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
        """Return the exit status (128 + n after signal n), or None while the process is running."""
        status = self.process.poll()
        return None if status is None else exit_status(status)

    def send(self, number: int) -> None:
        """Send a signal. SIGKILL is sent to the whole process group."""
        if self.process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(self._translated.get(number, number))

    def report(self) -> ErrorReport | None:
        """Return the error that the process reported, or None."""
        return None if self._error is None else ErrorReport.read(Path(f"/proc/self/fd/{self._error.fileno()}"))


def supervise(processes: Sequence[LocalProcess], signals: CaughtSignals, settle: float = SETTLE) -> int:
    """Wait for all processes and return the exit status of the run: 0, or the status of the first process that failed.

    After forwarding a signal, there is no time limit, because the scheduler has its own. A second Ctrl-C kills the
    processes. Unless a process failed, the status is INTERRUPTED after Ctrl-C and PREEMPTED after other signals. After
    a failure, the other processes have `settle` seconds before they are killed. The first error is printed in full, and
    every other error in one line.
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
        # If several processes ended at once, the one that was killed by a signal caused the others to end.
        for label, code in sorted(ended.items(), key=lambda item: -item[1]):
            # A process that has no handler yet dies from the signal, but has nothing to lose.
            asked = code == PREEMPTED or (bool(sent) and (code == INTERRUPTED or code - 128 in sent))
            if asked:
                code = INTERRUPTED if signal.SIGINT in sent else PREEMPTED
            # A failure takes precedence over a requested end. If only one rank is interrupted, the others fail because
            # of it.
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
        # If all ranks have the same error, their tracebacks differ at most in rank numbers.
        if shown is None or shown.summary != report.summary:
            labels_by_error.setdefault(report.summary, []).append(label)
    for summary, labels in labels_by_error.items():
        more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
        _print_error(f"{', '.join(labels[:NAMED])}{more}: {summary}")
    return status


def _reports(processes: Sequence[LocalProcess], running: Sequence[LocalProcess]) -> dict[str, ErrorReport]:
    """Return the errors of the processes that have ended, by label."""
    ended = [process for process in processes if process not in running]
    return {process.label: report for process in ended if (report := process.report()) is not None}


def _show_first_error(reports: Mapping[str, ErrorReport], finished: bool) -> ErrorReport | None:
    """Print the first error in full and return it. An error in a collective is caused by another rank's error, so it
    counts only if the run is over and there is no other error.
    """
    first = min(reports, key=lambda label: (reports[label].communication, reports[label].time), default=None)
    if first is None or (reports[first].communication and not finished):
        return None
    heading = f"the first error, of {first}:\n" if reports[first].traceback else ""
    _print_error(f"{heading}{reports[first].text.rstrip()}")
    return reports[first]


def describe(status: int) -> str:
    """Return a description of an exit status."""
    if status <= 128 or status - 128 not in {int(number) for number in signal.Signals}:
        return f"ended with exit status {status}"
    name = signal.Signals(status - 128).name
    hint = " (by the kernel, if memory ran out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}, exit status {status}"


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
