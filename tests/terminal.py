"""Run a command on a pseudo-terminal, and return the text that a person would see."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.patience import patience

TOKEN = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")
HIDDEN_CURSOR = "\x1b[?25l"


def on_terminal(
    command: Sequence[str],
    columns: int,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | None = None,
    during: Callable[[subprocess.Popen[bytes], str], None] | None = None,
    seconds: float = 60,
    typed: tuple[str, Sequence[bytes]] = ("", ()),
) -> tuple[int, str]:
    """Return the exit status of a command on a terminal of so many columns, and all that it wrote there.

    `stdout` goes elsewhere if given. `during` gets the process and the text so far, whenever there is more. `typed` has
    the prompt of the command and keys; the next keys are pressed whenever the command waits at an empty prompt. Fails
    with the text so far if the command runs for more than `seconds`.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: value for name, value in (environment or os.environ).items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave if stdout is None else stdout,
        stderr=slave,
        cwd=cwd,
        env=variables | {"TERM": "xterm-256color"},
    )
    os.close(slave)
    keys, prompt, answered = list(typed[1]), typed[0].encode(), 0
    written, end = b"", time.monotonic() + patience(seconds)
    while True:
        if not select.select([master], [], [], max(0.0, end - time.monotonic()))[0]:
            process.kill()
            pytest.fail(
                f"{command[0]} still ran after {seconds} s, with {len(keys)} keys to press; it wrote {written!r}"
            )
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # all writers have closed it
            break
        if not block:
            break
        written += block
        if keys and written.endswith(prompt) and written.count(b"\n") >= answered:  # a new line since the last keys
            answered = written.count(b"\n") + 1
            os.write(master, keys.pop(0))
        if during is not None:
            during(process, written.decode(errors="replace"))
    os.close(master)
    return process.wait(10), written.decode()


def hang_up(
    command: Sequence[str],
    reached: Callable[[], bool],
    environment: Mapping[str, str],
    ignored: bool,
    seconds: float = 300,
) -> int:
    """Run a command in a session of its own on a terminal, close the terminal once `reached()`, and return the status.

    The kernel then sends SIGHUP to the command, which is `ignored` as after `nohup` or `disown`.
    """
    master, slave = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    streams = {"stdin": slave, "stdout": slave, "stderr": slave, "env": {**environment, "TERM": "xterm-256color"}}
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=take_terminal, **streams)  # noqa: PLW1509
    os.close(slave)
    try:
        end = time.monotonic() + seconds
        written = b""
        while not reached() and process.poll() is None and time.monotonic() < end:
            if select.select([master], [], [], 0.05)[0]:
                written += os.read(master, 1 << 16)
        assert reached(), written.decode(errors="replace")
        os.close(master)
        return process.wait(seconds)
    finally:
        process.kill()


def screen(written: str, columns: int) -> list[str]:
    """Return the lines that are left on the screen; of a bar that is too wide, which is wrapped, parts stay."""
    lines, row, column = [""], 0, 0
    for token in TOKEN.split(written):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif token.startswith("\x1b"):
            if token.endswith("A"):
                row -= int(token[2:-1] or 1)
            elif token == "\x1b[2K":
                lines[row] = ""
            else:
                assert token.endswith("m"), f"{token!r} in {written!r}"
        for character in token if token[:1] >= " " else "":
            if column == columns:
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Replace standard input and output by terminals, and type lines there. Ctrl-D follows them."""
    left = iter(lines)

    def read(sign: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr("builtins.input", read)
