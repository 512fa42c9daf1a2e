"""A task: a command of this program as a child process, which is started again if it is killed."""

import ctypes
import shlex
import signal
import subprocess
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_coca.support.errors import FAILED, UNUSABLE
from megatron_coca.support.processes import PROGRAM, exit_status
from megatron_coca.support.regular_files import open_to_append

ATTEMPTS = 3
"""Number of times that a task starts its command before it fails."""
FINAL = (0, 2, 77, 78, 130)
"""Exit statuses after which the same command would end in the same way (docs/faults.md), and Ctrl-C."""
TEMPORARY = (69, 75, 76, 79)
"""Exit statuses of a child process after which a repetition may succeed (docs/faults.md), besides signals.

1 is not: it is the status of every traceback, and most of them would come again.
"""
STOPPED = 75
"""Exit status of a command that a scheduler's signal has stopped."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of a scheduler. The command gets SIGTERM, saves, and is not started again by this task."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Failure:
    """A piece of a command's work that is missing.

    Attributes:
        reason: one line.
        temporary: whether a repetition may succeed.
    """

    reason: str
    temporary: bool = False


def is_temporary(status: int) -> bool:
    """Return True if a repetition may succeed after this status of a child process; -n or 128 + n is signal n."""
    status = exit_status(status)
    return status in TEMPORARY or (status > 128 and status not in FINAL)


def status_of(failures: Collection[Failure]) -> int:
    """Return the exit status of a command with these failures: FAILED if a scheduler should start it again."""
    if any(failure.temporary for failure in failures):
        return FAILED
    return UNUSABLE if failures else 0


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
        with Commands() as commands:
            self.run(rank, commands)

    def run(self, rank: int, commands: "Commands") -> None:
        """Run the command as one of `commands`. Raises TaskFailed."""
        arguments, path = list(self.arguments), self.log
        if self.parts is not None:
            arguments += ["--part", f"{self.numbers[rank] + 1}/{self.parts}"]
            path = None if path is None else path.with_name(f"part_{self.numbers[rank] + 1}.txt")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        status = commands.run([*PROGRAM, *arguments], self.folder, path)
        if status:
            text = f"`megatron-coca {shlex.join(arguments)}` ended with status {status}"
            raise TaskFailed(text if path is None else f"{text}; see {path}", status)


def status_of_task(task: CommandTask, rank: int = 0, commands: "Commands | None" = None) -> int:
    """Run a task, and return its exit status. Ray can call this function in another process."""
    try:
        task(None, rank, 1) if commands is None else task.run(rank, commands)
    except TaskFailed as error:
        return error.status
    return 0


class Commands:
    """The running commands of a process, perhaps in several threads.

    Inside the block, a scheduler's signal sends SIGTERM to all of them, so that they save, and no other command is
    started. Signals are only received if the block is in the main thread, because Python allows handlers only there.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._running = set[subprocess.Popen[bytes]]()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._stop) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._terminate()  # after an exception, such as Ctrl-C

    def run(self, command: Sequence[str], folder: Path, log: Path | None) -> int:
        """Run a command up to ATTEMPTS times. Return its exit status, which is 128 + n after signal n."""
        status = STOPPED
        for _ in range(ATTEMPTS):
            if self.stopped:
                break
            process = _start(command, folder, log)
            self._running.add(process)
            try:
                if self.stopped:  # the signal came before `_running` had this process
                    process.terminate()
                status = exit_status(process.wait())
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                self._running.discard(process)
            if status in FINAL:
                break
        return status

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = True
        self._terminate()

    def _terminate(self) -> None:
        for process in tuple(self._running):
            process.terminate()


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
