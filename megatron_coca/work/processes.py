"""Child processes: how a command of this program starts another process, and how both end."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, NoReturn

from megatron_coca.support.errors import FAILED
from megatron_coca.support.regular_files import open_to_append
from megatron_coca.work.error_report import ERROR_FILE, ErrorReport
from megatron_coca.work.signals import PREEMPTION, handled
from megatron_coca.work.statuses import exit_status

MAIN = str(Path(__file__).parents[1] / "__main__.py")
"""`python MAIN train ...` does the same as `megatron-coca train ...`, even without installation and from any working
folder.
"""
PROGRAM = (sys.executable, "-u", MAIN)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def ending_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` for `Popen`. The child is then killed when the thread that starts it ends, even if SIGKILL
    ends this thread.

    The function acquires no lock that another thread could hold.
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(FAILED)

    return prepare


def start(command: Sequence[str], log: Path | None = None, **options: Any) -> Popen[bytes]:
    """Start a process that is killed when this process ends. If `log` is set, the output and errors are appended to it.

    `options` are those of `Popen`.
    """
    prepare = ending_with_parent()
    with nullcontext() if log is None else open_to_append(log) as output:
        errors = None if output is None else STDOUT
        return Popen(command, stdout=output, stderr=errors, preexec_fn=prepare, **options)  # noqa: PLW1509 - lock-free


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> list[int]:
    """Run processes at the same time, and return their exit statuses, which are 128 + n after signal n.

    After a signal of `PREEMPTION` or Ctrl-C, this function sends the processes SIGTERM, waits until they have saved and
    ended, and raises KeyboardInterrupt.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    processes: list[Popen[bytes]] = []
    with handled(PREEMPTION, interrupt):
        try:
            for command in commands:
                processes.append(start(command, env=environment))  # noqa: PERF401 - those before a failure are ended
            return [exit_status(process.wait()) for process in processes]
        except BaseException:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()
            raise


def run_to_its_end(command: Sequence[str]) -> int:
    """Run one process as `run_together` does, and return its exit status."""
    return run_together([command])[0]


class LocalProcess:
    """A child process in its own session, which is killed when this process dies.

    The terminal's Ctrl-C does not reach the child, so it receives every signal exactly once, through `send`. Signals in
    `translated` are replaced before they are sent, because they have a different meaning for the child's command. With
    `reports`, the child can write its error to an in-memory file, which exists as long as this process. The child's
    output is appended to `log`, if set.
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
        self._error = open(os.memfd_create("error"), "rb") if reports else None  # noqa: SIM115 - open while this exists
        variables = dict(environment)
        if self._error is not None:
            variables[ERROR_FILE] = f"/proc/{os.getpid()}/fd/{self._error.fileno()}"

        self.process = start(command, log, env=variables, stdin=DEVNULL, start_new_session=True)

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
