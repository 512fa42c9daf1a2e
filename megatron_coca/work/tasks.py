"""A task, which runs a command of this program as a child process and starts the command again if that may help."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, Self

from megatron_coca.work.processes import PROGRAM, start
from megatron_coca.work.signals import PREEMPTION, handled
from megatron_coca.work.statuses import FINAL, PREEMPTED, exit_status

ATTEMPTS = 3
"""Number of times that a task starts its command before it fails."""


class TaskFailed(RuntimeError):
    """A command ended with a status other than 0. The arguments are a message and this status."""

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


class Commands(ExitStack):
    """The running commands of a process, perhaps in several threads.

    If a signal of `PREEMPTION` arrives inside the block, all running commands receive SIGTERM, so that they save. No
    other command is started after the signal. This works only if the block is in the main thread, because Python allows
    no signal handlers elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stopped = False
        self._running = set[Popen[bytes]]()

    def __enter__(self) -> Self:
        self.callback(self._terminate)  # after an exception, such as Ctrl-C
        self.enter_context(handled(PREEMPTION, self._stop))
        return self

    def run(self, command: Sequence[str], folder: Path, log: Path | None) -> int:
        """Run a command up to ATTEMPTS times. Return its exit status, which is 128 + n after signal n."""
        status = PREEMPTED
        for _ in range(ATTEMPTS):
            if self.stopped:
                break
            process = start(command, log, cwd=folder, stdin=DEVNULL)
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
