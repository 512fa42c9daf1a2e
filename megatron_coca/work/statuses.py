"""Exit statuses of processes and commands: what they mean, and whether a repetition may help."""

import signal
from collections.abc import Collection
from dataclasses import dataclass

from megatron_coca.support.errors import FAILED, UNAVAILABLE, UNUSABLE

DONE = 0  # the last step is completed and saved
PREEMPTED = 75  # preempted by a signal, after saving; EX_TEMPFAIL of sysexits.h: try again later
HUNG = 76  # no progress for `watchdog_timeout` seconds
DIVERGED = 77  # too many bad steps, according to the configured policies
UNSAVED = 78  # preempted by a signal, nothing saved
UNJOINED = 79  # some processes did not join within `join_timeout`
INTERRUPTED = 130  # Ctrl-C (SIGINT), after saving if training had begun
MEANINGS = {
    DONE: "finished",
    FAILED: "an error",
    UNUSABLE: "invalid input, or files cannot be written",
    UNAVAILABLE: "an object store did not answer",
    PREEMPTED: "preempted",
    HUNG: "no progress",
    DIVERGED: "too many bad steps",
    UNSAVED: "preempted, nothing saved",
    UNJOINED: "some processes did not join",
    INTERRUPTED: "Ctrl-C",
}
EXIT_STATUSES = tuple(MEANINGS)
"""Every exit status of a training process; docs/faults.md describes the remedies."""
FINAL = (DONE, UNUSABLE, DIVERGED, UNSAVED, INTERRUPTED)
"""Exit statuses after which a restart does not help: the command would end the same way, or a user ended the run."""
TEMPORARY = (UNAVAILABLE, PREEMPTED, HUNG, UNJOINED)
"""Exit statuses of a child process after which a repetition may succeed. A repetition may also succeed if a signal
ended the process.

FAILED is not in this list, because every error with a traceback has this status, and most of these errors would occur
again.
"""


def exit_status(status: int) -> int:
    """Convert a status of `subprocess` to the status that a shell reports: -n, for signal n, becomes 128 + n."""
    return 128 - status if status < 0 else status


def signal_of(status: int) -> str | None:
    """Return the name of the signal that ended a process, such as "SIGKILL", from its status as a shell reports it."""
    return {number.value: number.name for number in signal.Signals}.get(status - 128)


def meaning(status: int) -> str:
    """Return the meaning of an exit status in a few words, such as "status 137, SIGKILL"."""
    meant = MEANINGS.get(status) or signal_of(status)
    return f"status {status}" + (f", {meant}" if meant else "")


def is_temporary(status: int) -> bool:
    """Return True if a repetition may succeed after this status of a child process; -n or 128 + n means signal n."""
    status = exit_status(status)
    return status in TEMPORARY or (status > 128 and status not in FINAL)


class Stopped(Exception):
    """An orderly end of the run before its last step, with the exit status `status`."""

    status = FAILED


class Preempted(Stopped):
    """Preempted by a signal, after saving."""

    status = PREEMPTED


class Unsaved(Stopped):
    """Preempted by a signal; the run has no `save` folder. Each time the job is requeued, it starts from step 0."""

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


@dataclass(frozen=True)
class Failure:
    """A piece of a command's work that is missing.

    Attributes:
        reason: why it is missing, in one line.
        temporary: whether a repetition may succeed.
    """

    reason: str
    temporary: bool = False


def status_of(failures: Collection[Failure]) -> int:
    """Return the exit status of a command with these failures: FAILED if a scheduler should start it again."""
    if any(failure.temporary for failure in failures):
        return FAILED
    return UNUSABLE if failures else 0
