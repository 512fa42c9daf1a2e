"""A task: a command of this program as a child process, which is started again if it is killed."""

import ctypes
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_coca.support.errors import FAILED, UNUSABLE
from megatron_coca.support.processes import PROGRAM
from megatron_coca.support.regular_files import open_to_append

ATTEMPTS = 3
"""Number of times that a task starts its command before it fails."""
FINAL = (0, 2, 77, 78, 130)
"""Exit statuses after which the same command would end in the same way (docs/faults.md), and Ctrl-C."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of a scheduler. The command gets SIGTERM, saves, and is not started again by this task."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Failure:
    """A piece of a command's work that is missing: the reason in one line, and the exit status of its child process.

    Negative statuses are signals, as in `subprocess`.
    """

    reason: str
    status: int = UNUSABLE


def status_of(failures: Iterable[Failure]) -> int:
    """Return the exit status of a command with these failures.

    The status is FAILED if a child was killed, or if its status is not in FINAL, so that a scheduler starts the command
    again.
    """
    statuses = [128 - failure.status if failure.status < 0 else failure.status for failure in failures]
    if any(status not in FINAL for status in statuses):
        return FAILED
    return UNUSABLE if statuses else 0


class TaskFailed(RuntimeError):
    """A command that ended with a status other than 0, the second argument. The first one describes it."""

    @property
    def status(self) -> int:
        return int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class CommandTask:
    """A step of a datatrove executor, `step(data, rank, world_size)`, that runs a command of this program.

    Attributes:
        arguments: the command and its arguments, without the program.
        folder: the working folder of the command.
        parts: the number of parts of the whole work; None runs the command without `--part`.
        numbers: the parts to do, counted from 0; the task with rank R does `numbers[R]`.
        logs: the folder for the output of the commands; None prints the output.
    """

    arguments: tuple[str, ...]
    folder: Path
    parts: int | None = None
    numbers: tuple[int, ...] = ()
    logs: Path | None = None

    @property
    def log(self) -> Path | None:
        """The file for the output of a command without parts."""
        return None if self.logs is None else self.logs / "output" / "finish.txt"

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        """Run the command. Raises TaskFailed."""
        arguments, path = list(self.arguments), self.log
        if self.parts is not None:
            arguments += ["--part", f"{self.numbers[rank] + 1}/{self.parts}"]
            path = None if path is None else path.with_name(f"part_{self.numbers[rank] + 1}.txt")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        status = _run([*PROGRAM, *arguments], self.folder, path)
        if status:
            text = f"`megatron-coca {shlex.join(arguments)}` ended with status {status}"
            raise TaskFailed(text if path is None else f"{text}; see {path}", status)


def status_of_task(task: CommandTask) -> int:
    """Run a task without parts, and return its exit status."""
    try:
        task(None, 0, 1)
    except TaskFailed as error:
        return error.status
    return 0


def run_task(task: CommandTask, rank: int, world_size: int) -> None:
    """Run a task, as a function that Ray can call in another process."""
    task(None, rank, world_size)


def _run(command: Sequence[str], folder: Path, log: Path | None) -> int:
    """Run a command up to ATTEMPTS times. Return its exit status, which is 128 + n after signal n."""
    stopped: list[int] = []
    status = 0
    for _ in range(ATTEMPTS):
        process = _start(command, folder, log)
        with _forwarded(process, stopped):
            status = process.wait()
        status = 128 - status if status < 0 else status
        if status in FINAL or stopped:
            break
    return status


def _start(command: Sequence[str], folder: Path, log: Path | None) -> "subprocess.Popen[bytes]":
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    output = None if log is None else open_to_append(log)
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - it takes no lock that another thread could hold
        )
    finally:
        if output is not None:
            output.close()


@contextmanager
def _forwarded(process: "subprocess.Popen[bytes]", stopped: list[int]) -> Iterator[None]:
    """Forward a scheduler's signals to the process as SIGTERM inside the block, and add them to `stopped`."""

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        process.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:  # an exception, such as Ctrl-C
            process.terminate()
            process.wait()
