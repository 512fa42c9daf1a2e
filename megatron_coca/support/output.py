"""Standard output and standard error, which can be lost while a command works.

If a terminal is closed, if a disk or a quota behind a log is full, or if the program that reads a pipe has ended, every
further write to that stream fails, whether by `print`, logging, warnings, progress bars or a library. `survive`
replaces the stream at its lowest level, so that no write raises an error. The rest of the text is lost.
"""

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

STANDARD = {"stdout": (1, "standard output"), "stderr": (2, "standard error")}
"""The descriptor of each stream, and its name in messages."""
STDERR = STANDARD["stderr"][0]
_PATIENCE = 1000
"""Milliseconds to wait for a reader if another program has made the stream non-blocking."""


def put(descriptor: int, data: bytes | memoryview) -> OSError | None:
    """Write bytes, and return the error if this fails. A signal handler may call this function."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError as error:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            if not waiting.poll(_PATIENCE):
                return error
        except OSError as error:
            return error
    return None


class SurvivingStream(io.RawIOBase):
    """A stream to a descriptor. Writes never fail. After a loss of text, the next text begins with a note.

    Attributes:
        failure: the error of the first write that failed, or None.
    """

    def __init__(self, descriptor: int, title: str) -> None:
        self._descriptor, self._title = descriptor, title
        self._lost, self._reason, self._told = 0, "", False
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        note = f"\n{self._title}: {self._lost:,} bytes could not be written here ({self._reason})\n"
        error = put(self._descriptor, note.encode()) if self._lost else None
        if error is None:
            self._lost, error = 0, put(self._descriptor, view)
        if error is not None:
            self._lost, self._reason = self._lost + len(view), str(error.strerror)
            self.failure = self.failure or error
        return len(view)

    def news(self) -> str | None:
        """Return a message about the first loss. Later calls return None."""
        if self.failure is None or self._told:
            return None
        self._told = True
        return f"{self._title}: cannot be written ({self.failure.strerror}); the work continues, and this text is lost"


_surviving: dict[str, SurvivingStream] = {}


def survive(*names: str) -> None:
    """Replace the streams `names` ("stdout", "stderr") of this process by surviving ones, until the process ends.

    A stream that a notebook or a test has replaced is left alone, because it does not belong to the process.
    """
    for name in names:
        stream, (descriptor, title) = getattr(sys, name), STANDARD[name]
        own = stream is getattr(sys, f"__{name}__") and _descriptor(stream) == descriptor
        if own and name not in _surviving:
            _surviving[name] = SurvivingStream(descriptor, title)
            with suppress(OSError):
                stream.flush()
            text = _text(stream, _surviving[name])
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)


def losses() -> list[str]:
    """Return a message for each surviving stream that has been lost since the last call."""
    return [text for stream in _surviving.values() if (text := stream.news()) is not None]


def _text(stream: Any, raw: SurvivingStream) -> TextIO:
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # after `python -u`
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors="backslashreplace",  # a character that the encoding lacks must not end the work either
        line_buffering=getattr(stream, "line_buffering", True),
        write_through=unbuffered,
    )


def open_missing_streams() -> None:
    """Discard the output to streams that the shell closed (`>&-`), for which Python has no stream.

    The descriptors are opened as well. Otherwise, the next opened file would get one of them, and a message of a
    library that writes to descriptor 2 would end up in that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
    for name in STANDARD:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))  # noqa: SIM115 (until the process ends)


def drop_closed_streams() -> bool:
    """Return whether the reader of standard output or standard error has ended. Discard the rest of such a stream."""
    closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
    for stream in closed:
        drop_output(stream)
    return bool(closed)


def drop_output(stream: TextIO) -> None:
    """Discard the rest of the output to a stream, unless the stream has no descriptor, as in a notebook."""
    if (descriptor := _descriptor(stream)) is not None:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _is_closed(stream: TextIO) -> bool:
    descriptor = _descriptor(stream)
    if descriptor is None:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    return bool(poll.poll(0))
