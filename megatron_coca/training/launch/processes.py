"""Supervise the processes of a run on a host: forward signals to them, and stop all of them when one fails.

On a signal, DeepSpeed's launcher and torchrun stop their processes and return an exit status of their own. This module
forwards the signal instead, waits while the processes save, and returns their exit status.
"""

import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence

from megatron_coca.work.error_report import ErrorReport
from megatron_coca.work.processes import LocalProcess
from megatron_coca.work.signals import CaughtSignals
from megatron_coca.work.statuses import DONE, INTERRUPTED, PREEMPTED, UNSAVED, signal_of

SETTLE = 5.0
"""Seconds for the other processes to end after one process failed. This is enough time to print their own errors."""
PREEMPTED_SETTLE = 300.0
"""Seconds for the other processes to end after one process was preempted. They may still be saving."""
NAMED = 4
"""Maximum number of ranks that are named if many report the same error."""
INTERVAL = 0.05


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
            # The signal kills a process that has no handler yet. Such a process has nothing to save.
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
    name = signal_of(status)
    if name is None:
        return f"ended with exit status {status}"
    hint = " (by the kernel, if memory ran out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}, exit status {status}"


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
