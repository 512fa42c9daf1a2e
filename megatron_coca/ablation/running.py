"""Run cells, several at a time. The child processes of a cell run one after another."""

import os
import re
import shlex
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NoReturn

from megatron_coca.ablation import cells as files
from megatron_coca.ablation.cells import CellRecord, State
from megatron_coca.ablation.grid import Cell
from megatron_coca.checkpoints import native
from megatron_coca.evaluation.results import EvaluationError, check_writable
from megatron_coca.evaluation.suite import Command, describe_exit
from megatron_coca.support import console
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.errors import FAILED
from megatron_coca.support.host import preloaded_libraries
from megatron_coca.support.regular_files import open_to_append
from megatron_coca.work.locks import exclusive_lock, lock_file
from megatron_coca.work.processes import PROGRAM, LocalProcess
from megatron_coca.work.signals import FORWARDED, CaughtSignals
from megatron_coca.work.statuses import Failure, Preempted, is_temporary

TRAIN, EVALUATE = (*PROGRAM, "train"), (*PROGRAM, "evaluate")
LOG, CONFIG = "log.txt", "ablation.yml"
POLL_SECONDS = 0.2
PROGRESS_SECONDS = 2.0
"""Seconds between two updates of the progress. An update reads the metrics of all running cells."""
TRAINING_SHARE = 0.8
"""The share of a cell's time that training is assumed to take. It is used to estimate the time left."""
LOG_TAIL = 20_000
ERROR = re.compile(r"[\w.]*(Error|Exception): ")
"""Matches the start of the error line in a traceback. Notes and warnings may follow that line."""
RANK = re.compile(r"\[rank\d+\]: ")
"""Matches the prefix that PyTorch adds to each line of a traceback in a distributed process."""


@dataclass(frozen=True)
class Machine:
    """The CPU cores and GPUs to divide. `gpus` are entries of CUDA_VISIBLE_DEVICES. `device` is a GPU's name or cpu."""

    cores: int
    gpus: tuple[str, ...]
    device: str

    @classmethod
    def here(cls, device: str) -> "Machine":
        """Return the cores and GPUs that this process may use by OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES."""
        import torch

        cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        count = torch.cuda.device_count() if device != "cpu" else 0
        if not count:
            return cls(cores, (), "cpu")
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return cls(cores, tuple(visible or map(str, range(count)))[:count], torch.cuda.get_device_name())


@dataclass(frozen=True)
class JobShare:
    """The threads and GPUs for one of several cells that run at the same time."""

    threads: int
    gpus: tuple[str, ...]

    def variables(self, ranks: int) -> dict[str, str]:
        """Return the environment variables for a child that starts `ranks` processes."""
        return {"OMP_NUM_THREADS": str(max(1, self.threads // ranks)), "CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def divide(machine: Machine, jobs: int) -> list[JobShare]:
    """Divide a machine into `jobs` equal shares. Raises EvaluationError if there are fewer GPUs than jobs."""
    each = len(machine.gpus) // jobs
    if machine.gpus and not each:
        raise EvaluationError(f"--jobs {jobs}: this machine has {len(machine.gpus)} GPUs; use at most this many jobs")
    threads = max(1, machine.cores // jobs)
    return [JobShare(threads, machine.gpus[number * each : (number + 1) * each]) for number in range(jobs)]


class Job:
    """A cell that is being trained and evaluated.

    Attributes:
        failures: the failure of the training, or the failure of each failed task.
    """

    def __init__(self, cell: Cell, share: JobShare, device: str) -> None:
        self.cell, self.share, self._device = cell, share, device
        self.failures: list[Failure] = []
        self._record = files.read_cell(cell)
        self._began = time.monotonic()
        self._resumed = self._newest()
        self._before = files.training_seconds(cell.run, until=self._resumed), files.evaluation_seconds(cell)
        self._process: LocalProcess | None = None
        self._command: Command | None = None  # None while training
        self._log_start = 0
        self._failed: set[str] = set()

    def advance(self) -> bool:
        """Start the next process if none is running. Return False once the cell is finished or has failed."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return True
            self._process = None
            self._ended(status)
        if not self.failures and not files.is_trained(self.cell) and self._needs_training():
            self._start(None)
            return True
        if files.is_trained(self.cell):
            self._keep_curve()
            for command in files.missing_commands(self.cell, self._record):
                if command.task not in self._failed:
                    self._start(command)
                    return True
        self._write("failed" if self.failures else "done")
        return False

    @property
    def reasons(self) -> str:
        return "; ".join(failure.reason for failure in self.failures)

    @property
    def step(self) -> int:
        """The last training step in the metrics, or 0."""
        return files.last_step(self.cell.run)

    @property
    def fraction(self) -> float:
        """The finished share of the cell, for estimates of the time left."""
        if self._command is None and not files.is_trained(self.cell):
            return TRAINING_SHARE * min(1.0, self.step / self.cell.steps)
        missing = len(files.missing_commands(self.cell, self._record))
        return TRAINING_SHARE + (1 - TRAINING_SHARE) * (1 - missing / max(1, len(self.cell.commands)))

    @property
    def position(self) -> str:
        """The progress within the current phase, as text."""
        if self._command is None:
            return f"{self.cell.name}: step {self.step} of {self.cell.steps}"
        number = self.cell.commands.index(self._command) + 1
        return f"{self.cell.name}: {self._command.task} ({number} of {len(self.cell.commands)} tasks)"

    @property
    def activity(self) -> str:
        """The current phase. The console shows a line when the phase changes."""
        return "training" if self._command is None else f"evaluating {self._command.task}"

    def send(self, number: int) -> None:
        if self._process is not None:
            self._process.send(number)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def interrupted(self) -> None:
        """Record the state and the cost of the cell after an interruption."""
        self._write("trained" if files.is_trained(self.cell) else "started")

    def _newest(self) -> int:
        """Return the step of the newest complete checkpoint, or 0."""
        return max(native.steps(self.cell.run), default=0)

    def _needs_training(self) -> bool:
        missing = files.missing_commands(self.cell, self._record)
        return bool(missing) or not (self.cell.results / files.CURVE).is_file()

    def _start(self, command: Command | None) -> None:
        cell = self.cell
        cell.run.mkdir(parents=True, exist_ok=True)
        if command is None:
            write_file(cell.run / CONFIG, cell.config.to_yaml())
            arguments = [*TRAIN, str(cell.run / CONFIG), "--auto-resume"]
        else:
            arguments = [*EVALUATE, *command.arguments, "--overwrite"]
        log = cell.run / LOG
        with open_to_append(log) as file:
            file.write(f"$ {shlex.join(arguments)}\n".encode())
        self._log_start, self._command = log.stat().st_size, command
        environment = {**os.environ, **self.share.variables(cell.ranks if command is None else 1)}
        self._process = LocalProcess(cell.name, arguments, environment, log=log)

    def _ended(self, status: int) -> None:
        command, self._command = self._command, None
        if command is None:
            if not files.is_trained(self.cell):
                last = "ended before its last step" if status == 0 else self._reason(status)
                # An error with a traceback, or an end at `exit_interval`, is temporary only if a checkpoint is new.
                progress = status in (0, FAILED) and self._newest() > self._resumed
                self.failures.append(Failure(f"training: {last}", progress or is_temporary(status)))
            return
        if status == 0 or (status == 2 and files.only_unsupported(command.files)):
            measured = [file.relative_to(self.cell.results) for file in command.files]
            kept, cell = self._record, self.cell
            digests = {str(path): cell.measurements[path] for path in measured}
            inputs = {str(path): cell.inputs[path] for path in measured if path in cell.inputs}
            self._record = kept.model_copy(
                update={"evaluated": kept.evaluated | digests, "inputs": kept.inputs | inputs}
            )
            self._write("trained")
        else:
            self._failed.add(command.task)
            self.failures.append(Failure(f"{command.task}: {self._reason(status)}", is_temporary(status)))

    def _reason(self, status: int) -> str:
        """Return the last error line in the child's log, with the path of the log."""
        log = self.cell.run / LOG
        with log.open("rb") as file:
            file.seek(max(self._log_start, log.stat().st_size - LOG_TAIL))
            text = file.read().decode(errors="replace")
        lines = [RANK.sub("", line, count=1).strip() for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if ERROR.match(line)] or lines
        reason = lines[-1] if lines and status < 128 else describe_exit(status)
        return f"{reason} ({log})"

    def _keep_curve(self) -> None:
        if (self.cell.results / files.CURVE).is_file() and self._record.status != "started":
            return
        files.write_curve(self.cell)
        self._write("trained")

    def _write(self, status: str) -> None:
        trained = files.training_seconds(self.cell.run) if self.cell.run.is_dir() else self._record.training_seconds
        evaluated = files.evaluation_seconds(self.cell)
        wall = time.monotonic() - self._began
        self._began = time.monotonic()
        own = (trained - self._before[0]) + (evaluated - self._before[1])
        self._before = trained, evaluated
        versions = native.code_versions()
        self._record = CellRecord.model_validate(
            self._record.model_dump()
            | {
                "status": status,
                "reason": self.reasons or None,
                "steps": self.cell.steps,
                "data": self.cell.data,
                "training_seconds": trained,
                "evaluation_seconds": evaluated,
                "overhead_seconds": self._record.overhead_seconds + max(0.0, wall - own),
                "device": self._device,
                "threads": self.share.threads,
                "torch": versions["torch"],
                "commit": versions.get("commit"),
                "preloaded": preloaded_libraries(),
            }
        )
        files.write_cell(self.cell, self._record)


class CellBusy(EvaluationError):
    """Another process runs this cell."""


@contextmanager
def locked(cell: Cell) -> Iterator[None]:
    """Lock a cell while the context is active. Raises CellBusy, or EvaluationError if it cannot be locked."""
    with ExitStack() as locks:
        for folder in dict.fromkeys((cell.results, cell.run)):
            lock = lock_file(folder)
            check_writable(lock)
            busy = CellBusy(f"{folder}: another process runs this cell; wait for it, or name other cells with --only")
            locks.enter_context(exclusive_lock(lock, EvaluationError, busy, temporary=True))
        yield


def run_cells(cells: Sequence[Cell], machine: Machine, jobs: int) -> list[Failure]:
    """Train and evaluate the unfinished cells, `jobs` at a time. Return the failures of all cells.

    A cell that another process runs is skipped, so several hosts can share the cells.

    Raises:
        EvaluationError: a cell cannot be locked, or the machine cannot be divided.
        Preempted, KeyboardInterrupt: a signal arrived. All children have ended, and training runs have saved.
    """
    shares = divide(machine, jobs)
    needed = max((cell.ranks for cell in cells), default=1)
    if machine.gpus and needed > len(shares[0].gpus):
        left = len(shares[0].gpus)
        raise EvaluationError(f"--jobs {jobs}: leaves {left} GPUs to a cell that needs {needed}; lower --jobs")
    missing = [cell for cell in cells if files.state_of(cell) is not State.DONE]
    seeds = list(dict.fromkeys(cell.seed for cell in cells))
    missing.sort(key=lambda cell: seeds.index(cell.seed))  # if this call ends early, all models have the same seeds
    waiting, status = deque(missing), StatusLines(len(cells), len(cells) - len(missing))
    with ExitStack() as all_locks, CaughtSignals(FORWARDED) as signals, status.progress:
        running: dict[int, tuple[Job, ExitStack]] = {}
        failures: list[Failure] = []
        while waiting or running:
            for number, share in enumerate(shares):
                while number not in running and (chosen := _next(waiting)) is not None:
                    cell, lock = chosen, ExitStack()
                    all_locks.push(lock)
                    if _begin(cell, lock, status):
                        running[number] = Job(cell, share, machine.device), lock
            if waiting and not running:  # the waiting cells need weights, and no running cell trains them
                failures += [_without_start(cell, status) for cell in waiting]
                break
            for number, (job, lock) in list(running.items()):
                if not job.advance():
                    del running[number]
                    lock.close()
                    failures += [Failure(f"{job.cell.name}: {each.reason}", each.temporary) for each in job.failures]
                    status.ended(job)
            jobs_now = [job for job, _ in running.values()]
            status.show(jobs_now)
            if signals.requested is not None:
                _stop(jobs_now, signals)
            time.sleep(POLL_SECONDS)
    return failures


def _next(waiting: deque[Cell]) -> Cell | None:
    """Remove and return the first cell that can start, or None. A cell waits until `Cell.start` is trained."""
    for cell in waiting:
        if cell.start is None or files.is_trained(cell.start):
            waiting.remove(cell)
            return cell
    return None


def _without_start(cell: Cell, status: "StatusLines") -> Failure:
    """Return why a cell cannot start. The failure is temporary if `Cell.start` is not finished."""
    assert cell.start is not None
    finished = files.state_of(cell.start) is State.DONE
    remedy = (
        f"remove {cell.start.results} to train it again" if finished else f"train it first: --only {cell.start.name}"
    )
    reason = f"it starts with the weights of {cell.start.name}, and {cell.start.run} has none; {remedy}"
    console.write(f"{cell.name}: skipped ({reason})")
    status.skipped()
    return Failure(f"{cell.name}: {reason}", not finished)


def _begin(cell: Cell, lock: ExitStack, status: "StatusLines") -> bool:
    """Lock an unfinished cell. Return False if another process runs it or has finished it."""
    try:
        lock.enter_context(locked(cell))
    except CellBusy as error:
        console.write(f"{cell.name}: skipped ({error})")
        return False
    if files.state_of(cell) is not State.DONE:
        return True
    lock.close()
    status.done_elsewhere(cell)
    return False


def _stop(jobs: Sequence[Job], signals: CaughtSignals) -> NoReturn:
    """Terminate the children and wait until they have saved. A second Ctrl-C kills them."""
    name, interrupts = signals.requested, 0
    console.write(f"{name}: stopping {len(jobs)} running cells; run the same command again to resume")
    for job in jobs:
        job.send(signal.SIGTERM)
    while any(job.running() for job in jobs):
        interrupts += signals.take().count(signal.SIGINT)
        if interrupts > 1:
            for job in jobs:
                job.send(signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    for job in jobs:
        job.interrupted()
    if name == "SIGINT":
        raise KeyboardInterrupt
    raise Preempted(f"preempted ({name}); run the same command again to resume")


class StatusLines:
    """Prints a line for each change of a cell's phase, and the progress of all cells with the time left.

    The log in each run's folder has the details.
    """

    def __init__(self, total: int, done: int) -> None:
        self.progress = console.Progress("ablation", total, "cells", done, show=done < total)
        self._total, self._done, self._ended = total, done, done
        self._shown: dict[str, str] = {}
        self._due = 0.0

    def show(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._shown.get(job.cell.name) != job.activity:
                console.write(f"{job.cell.name}: {job.activity}")
        self._shown = {job.cell.name: job.activity for job in jobs}
        if (now := time.monotonic()) >= self._due:
            self._due = now + PROGRESS_SECONDS
            self.progress.details = [job.position for job in jobs]
            self.progress.done = self._ended + sum(job.fraction for job in jobs)
            self.progress.advance(0)

    def skipped(self) -> None:
        self._ended += 1

    def done_elsewhere(self, cell: Cell) -> None:
        self._done += 1
        self._ended += 1
        console.write(f"{cell.name}: finished by another process, {self._done} of {self._total}")

    def ended(self, job: Job) -> None:
        self._done += not job.failures
        self._ended += 1
        self._due = 0.0
        text = f"failed: {job.reasons}" if job.failures else f"done, {self._done} of {self._total}"
        console.write(f"{job.cell.name}: {text}")
