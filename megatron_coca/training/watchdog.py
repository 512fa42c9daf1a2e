"""What is told of an error that ends a training process: once, though every rank may have one.

Ranks that the launching process of this project has started write their error to a file, and the launching process
prints the first one (`launch/processes.py`). The file is torchrun's: its name comes in TORCHELASTIC_ERROR_FILE, and its
content is what torchrun reads, so that torchrun finds the first error too. All other processes print theirs.

Only the standard library is imported here: an import of anything else may be what fails.
"""

import faulthandler
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NamedTuple, Self

from megatron_coca.training.exit_status import HUNG

GRACE = 10.0
"""Seconds between a rank's report and its end. Ranks do not notice a hang at the same moment, and the end of the first
makes the launcher stop the rest: all must have written by then.
"""
LONGEST_POLL = 1.0
COMMUNICATION = ("distributed_c10d.py", f"{os.sep}deepspeed{os.sep}comm{os.sep}")
"""Names of files in which a process waits for others."""
STDERR = 2


class Beat(NamedTuple):
    """Progress: the how-many-th, what was reached, and when on the monotonic clock."""

    number: int
    what: str
    at: float


class Watchdog:
    """Ends the process with status HUNG once `beat` was not called for `timeout` seconds, or a job in the background,
    which `follow` is told of, has made no progress for so long.

    Before, the stacks of all threads are written to standard error and to `hang_rank_<rank>.txt` in `report_folder`,
    with the host, the last beat and what the main thread is in. A rank that waits for others in a collective is told
    from the one that they wait for by the last two. After the report the process is given `GRACE` seconds; if it goes
    on meanwhile, so does the run.

    A daemon thread watches. It needs Python's global lock, so C code that never gives the lock back would stop it too;
    then, 3 times GRACE later, faulthandler's own thread writes the stacks to standard error and ends the process with
    status 1. That thread also strikes after the process was suspended (SIGSTOP) for that long; shorter suspensions
    do not count. faulthandler has one such timer a process, so only one watchdog may run at a time.
    """

    def __init__(
        self,
        timeout: float | None,
        report_folder: Path | None,
        rank: int,
        grace: float = GRACE,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """`timeout` in seconds, None for a watchdog that does nothing; `end` ends the process with a status."""
        self._timeout, self._folder, self._rank, self._grace, self._end = timeout, report_folder, rank, grace, end
        self._poll = min(LONGEST_POLL, (timeout or LONGEST_POLL) / 4)
        self._main = threading.main_thread().ident
        self._beat = Beat(0, "start", time.monotonic())
        self._job: Beat | None = None
        self._pauses = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.beat("start")
        if self._timeout is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def beat(self, what: str) -> None:
        """There is progress: `what`, for example "step 12" or "saving", is reached. Costs less than a microsecond."""
        self._beat = Beat(self._beat.number + 1, what, time.monotonic())

    def follow(self, what: str | None) -> None:
        """A job in the background has reached `what`; None: there is none any more."""
        number = self._job.number + 1 if self._job is not None else 1
        self._job = None if what is None else Beat(number, what, time.monotonic())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch within: for what takes long and cannot beat, such as a first compilation."""
        self._pauses += 1
        try:
            yield
        finally:
            self.beat(self._beat.what)
            self._pauses -= 1

    def _watch(self) -> None:
        assert self._timeout is not None
        silent, before, last = 0.0, time.monotonic(), self._beat
        job_silent, last_job = 0.0, self._job
        while not self._over.is_set():
            faulthandler.dump_traceback_later(self._timeout + 3 * self._grace, exit=True, file=STDERR)
            self._over.wait(self._poll)
            now = time.monotonic()
            # A process that was suspended has not hung: of a long gap only as much counts as a poll may take.
            passed = min(now - before, 2 * self._poll)
            silent, job_silent, before = silent + passed, job_silent + passed, now
            if last_job is None or self._job is not last_job:
                job_silent, last_job = 0.0, self._job
            elif job_silent >= self._timeout:
                self._report_and_end(last_job, lambda: self._job)
                job_silent = 0.0
            if self._pauses or self._beat is not last:
                silent, last = 0.0, self._beat
            elif silent >= self._timeout:
                self._report_and_end(last, lambda: self._beat)
                silent = 0.0

    def _report_and_end(self, last: Beat, newest: Callable[[], Beat | None]) -> None:
        text = self._describe(last)
        # In threads of their own: a full pipe or a file system that hangs must not keep the process.
        for write in (self._to_stderr, self._to_folder):
            threading.Thread(target=write, args=(text,), daemon=True).start()
        if self._over.wait(self._grace):
            return
        now = newest()
        if now is last:
            self._end(HUNG)
        else:
            reached = f"goes on with {now.what!r}" if now is not None else f"has finished {last.what!r}"
            self._to_stderr(f"rank {self._rank}: {reached}; set watchdog_timeout higher\n")

    def _describe(self, last: Beat) -> str:
        frame = sys._current_frames().get(self._main or 0)
        return (
            f"rank {self._rank} on {socket.gethostname()}: no progress for {time.monotonic() - last.at:.0f} s "
            f"(watchdog_timeout {self._timeout:g}); last was {last.what!r}, number {last.number}; "
            f"the main thread {_doing(frame)}\n{_all_stacks()}\n"
        )

    def _to_stderr(self, text: str) -> None:
        rest = text.encode()
        while rest:
            rest = rest[os.write(STDERR, rest) :]

    def _to_folder(self, text: str) -> None:
        if self._folder is None:
            return
        path = self._folder / f"hang_rank_{self._rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            self._to_stderr(f"rank {self._rank}: {path}: cannot be written ({error})\n")


def _doing(frame: FrameType | None) -> str:
    """What the innermost frame of a thread says about it, and whether it lies in communication between ranks."""
    if frame is None:
        return "has ended"
    waits = any(name in file for file in _files(frame) for name in COMMUNICATION)
    return f"{'waits for other ranks' if waits else 'is'} in {_place(frame)}"


def _files(frame: FrameType | None) -> Iterator[str]:
    """The source files of a frame and of those that called it."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _all_stacks() -> str:
    """The stacks of all threads, through memory: faulthandler keeps the global lock while it writes, so it must not
    write to where it could wait.
    """
    with open(os.memfd_create("stacks"), "w+", errors="replace") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TORCHRUN = "TORCHELASTIC_RUN_ID"


class HangReport(NamedTuple):
    """What a process tells of its end.

    Attributes:
        summary: one line.
        text: all of it: a traceback, or a message.
        traceback: whether it is an error that nobody foresaw.
        communication: whether it was raised while ranks exchanged data: mostly the consequence of another one's end.
        time: when, in seconds since the epoch.
    """

    summary: str
    text: str
    traceback: bool
    communication: bool
    time: float

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """What a process has written to its error file, or None where it wrote none."""
        try:
            message = json.loads(file.read_text())["message"]
            extra = message["extraInfo"]
            text = extra.get("py_callstack")
            return cls(
                message["message"].partition("\n")[0],
                text or message["message"],
                text is not None,
                bool(extra["communication"]),
                float(extra["time"]),
            )
        except (OSError, ValueError, KeyError, TypeError):  # none, or of a process that was killed while it wrote
            return None

    def write(self, file: Path) -> None:
        """Leave it in an error file, in the form that torchrun reads."""
        extra = {"timestamp": str(int(self.time)), "time": self.time, "communication": self.communication}
        extra |= {"py_callstack": self.text} if self.traceback else {}
        file.write_text(
            json.dumps({"message": {"message": self.summary if self.traceback else self.text, "extraInfo": extra}})
        )


def install() -> None:
    """Report errors that end the process, from now on."""
    sys.excepthook = _report


def tell(message: object) -> None:
    """Tell why the process ends, where it ends in good order: `message` needs no traceback."""
    text = str(message)
    if not _wrote(HangReport(text.partition("\n")[0], text, False, False, time.time())):
        print(text, file=sys.stderr)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for line in shadowed_modules(trace):
        error.add_note(line)
    text = "".join(traceback.format_exception(kind, error, trace))
    summary = "".join(traceback.format_exception_only(kind, error)[:1]).strip().partition("\n")[0]
    inside = any(name in frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace) for name in COMMUNICATION)
    if not _wrote(HangReport(summary, text, True, inside, time.time())):
        print(text, end="", file=sys.stderr)


def _wrote(report: HangReport) -> bool:
    """Whether the launching process will print the report. torchrun prints little of it, so there the process does."""
    file = os.environ.get(ERROR_FILE)
    if not file:
        return False
    try:
        report.write(Path(file))
    except OSError as error:
        print(f"{file}: cannot be written ({error})", file=sys.stderr)
        return False
    return _TORCHRUN not in os.environ


def shadowed_modules(trace: TracebackType | None) -> list[str]:
    """A line for each file that was imported in the place of a module of the standard library, by mistake as a rule."""
    names = [(name, _file(sys.modules.get(name))) for name in sorted(sys.stdlib_module_names)]
    # A module that failed while it was imported is found in the traceback only.
    names += [
        (str(frame.f_globals.get("__name__")), frame.f_globals.get("__file__")) for frame, _ in traceback.walk_tb(trace)
    ]
    installed = _installed()
    found = {name: file for name, file in names if name in sys.stdlib_module_names and file}
    return [
        f"{file} is imported in the place of Python's own module `{name}`, which other packages need: rename it"
        for name, file in found.items()
        if not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in installed)
    ]


def _file(module: ModuleType | None) -> str | None:
    return getattr(module, "__file__", None)


def _installed() -> list[str]:
    """The folders of Python and of installed packages; one of these, setuptools, replaces distutils on purpose."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [folder for folder in sys.path if folder.endswith(("-packages", "lib-dynload", ".zip"))]
    return [os.path.realpath(folder) for folder in folders]
