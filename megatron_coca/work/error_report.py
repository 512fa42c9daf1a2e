"""The report of the error that ended a child process, for the process that started it.

If the environment variable TORCHELASTIC_ERROR_FILE names a file, a process writes its error to this file. The process
that started it prints the first error of all its child processes (`training/launch/processes.py`). The variable and
the format are those of torchrun, so torchrun also finds the first error. A process without this variable prints its
error itself.

This module imports only the standard library, because a failed import of another library may be the error to report.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from megatron_coca.support.plain_text import plain

COMMUNICATION = ("distributed_c10d.py", f"{os.sep}deepspeed{os.sep}comm{os.sep}")
"""Parts of the paths of source files with code that waits for other ranks."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TORCHRUN = "TORCHELASTIC_RUN_ID"


def communicates(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Return whether one of these frames waits for other ranks."""
    return any(name in frame.f_code.co_filename for frame, _ in frames for name in COMMUNICATION)


class ErrorReport(NamedTuple):
    """The error that ended a process.

    Attributes:
        summary: the error in one line.
        text: the error message or, for an unexpected error, the traceback.
        traceback: whether `text` is a traceback.
        communication: whether the process was waiting for other ranks. An error of another rank is then the likely
            cause.
        time: time of the error in seconds, from `time.time`.
    """

    summary: str
    text: str
    traceback: bool
    communication: bool
    time: float

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return the report in an error file, or None if the file is missing or incomplete."""
        try:
            message = json.loads(file.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            text = extra.get("py_callstack")
            return cls(
                message["message"].partition("\n")[0],
                text or message["message"],
                text is not None,
                bool(extra["communication"]),
                float(extra["time"]),
            )
        except (OSError, ValueError, KeyError, TypeError):  # incomplete if the process was killed
            return None

    def write(self, file: Path) -> None:
        """Write the error file in torchrun's format."""
        extra = {"timestamp": str(int(self.time)), "time": self.time, "communication": self.communication}
        extra |= {"py_callstack": self.text} if self.traceback else {}
        file.write_text(
            json.dumps({"message": {"message": self.summary if self.traceback else self.text, "extraInfo": extra}}),
            encoding="utf-8",
        )


def install() -> None:
    """Report uncaught exceptions from now on."""
    sys.excepthook = _report


def tell(message: object) -> None:
    """Report the reason for an expected exit, which needs no traceback."""
    text = plain(str(message))
    if not _wrote(ErrorReport(text.partition("\n")[0], text, False, False, time.time())):
        print(text, file=sys.stderr)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = plain("".join(traceback.format_exception(kind, error, trace)))
    summary = "".join(traceback.format_exception_only(kind, error)[:1]).strip().partition("\n")[0]
    if not _wrote(ErrorReport(summary, text, True, communicates(traceback.walk_tb(trace)), time.time())):
        print(text, end="", file=sys.stderr)


def _wrote(report: ErrorReport) -> bool:
    """Write the error file, and return whether the launcher will print the error. Under torchrun, the process itself
    must print the error.
    """
    file = os.environ.get(ERROR_FILE)
    if not file:
        return False
    try:
        report.write(Path(file))
    except OSError as error:
        print(f"{file}: cannot be written ({error})", file=sys.stderr)
        return False
    return _TORCHRUN not in os.environ
