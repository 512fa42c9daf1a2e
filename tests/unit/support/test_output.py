"""Output that nobody can read or store never raises an error, whoever writes it."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WRITERS = """
import logging, os, sys, time, warnings
from megatron_coca.support import console, output
output.open_missing_streams()
output.survive("stdout", "stderr")
"""
EVERYTHING = """
for _ in range(200):
    print("x" * 1000)
    print("x" * 1000, file=sys.stderr, flush=True)
sys.stdout.write("ä \\udcff\\n")
sys.stdout.flush()
console.set_up_logging(True)
logging.getLogger("megatron_coca").warning("a warning")
warnings.warn("another")
with console.Progress("task", 10) as progress:
    progress.advance(10)
    console.write("a line")
from tqdm import tqdm
for _ in tqdm(range(10)):
    pass
console.display("rich").stop()
open(sys.argv[1], "w").write("|".join(output.losses() + output.losses()))
"""


def run(code: str, *arguments: str, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITERS + code, *arguments]
    return subprocess.run(command, check=False, text=True, timeout=60, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("lost", ["no reader", "full disk", "closed terminal", "closed by the shell"])
def test_no_writer_fails(lost: str, unbuffered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, descriptor = os.pipe() if lost == "no reader" else os.openpty()
    os.close(reader)
    if lost == "full disk":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setenv("PYTHONUNBUFFERED", "1" if unbuffered else "")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    said = tmp_path / "said"
    if lost == "closed by the shell":
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" 0<&- >&- 2>&-', "sh", sys.executable, "-c", WRITERS + EVERYTHING, str(said)],
            check=False,
            timeout=60,
        )
        assert done.returncode == 0 and said.read_text() == ""
        return
    done = run(EVERYTHING, str(said), stdout=descriptor, stderr=descriptor)
    reason = {"no reader": "Broken pipe", "full disk": "No space left on device"}.get(lost, "Input/output error")
    assert done.returncode == 0 and said.read_text().split("|") == [
        f"standard {name}: cannot be written ({reason}); the work continues, and this text is lost"
        for name in ("output", "error")
    ]


def test_a_file_that_takes_text_again_says_how_much_is_missing(tmp_path: Path) -> None:
    """The limit of a file's size stands for a quota: after 100 bytes nothing more fits, until the file is emptied."""
    code = """
print("a" * 99)
print("b" * 99)
print("c" * 99, file=sys.stderr)
os.truncate(sys.argv[1], 0)
print("d", flush=True)
"""
    log = tmp_path / "log"
    with log.open("ab") as file:
        done = run(
            code,
            str(log),
            stdout=file,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        )
    assert done.returncode == 0 and done.stderr == "c" * 99 + "\n"
    assert re.fullmatch(r"\nstandard output: 100 bytes .*\(File too large\)\nd\n", log.read_text())


def test_a_pipe_that_another_program_made_non_blocking() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS + 'print("x" * 200_000); print("end")'], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    time.sleep(0.3)
    with open(reader) as file:
        text = file.read()
    assert process.communicate()[1] == b"" and text == "x" * 200_000 + "\nend\n"


def test_a_message_of_a_library_does_not_end_up_in_a_file(tmp_path: Path) -> None:
    """If the shell has closed the streams, the next file must not get descriptor 2, to which libraries write."""
    code = 'file = open(sys.argv[1], "wb"); os.write(2, b"noise"); os.write(1, b"noise"); file.write(b"data")'
    command = ["sh", "-c", 'exec "$@" 0<&- >&- 2>&-', "sh", sys.executable, "-c", WRITERS + code, str(tmp_path / "f")]
    assert subprocess.run(command, check=False).returncode == 0 and (tmp_path / "f").read_bytes() == b"data"


def test_a_handler_of_signals_survives(tmp_path: Path) -> None:
    """The answer to a signal is written at once, past Python's streams."""
    code = """
import signal
from megatron_coca.work.signals import CaughtSignals
with CaughtSignals(answer="saving") as caught:
    os.kill(os.getpid(), signal.SIGHUP)
open(sys.argv[1], "w").write(caught.requested)
"""
    with open("/dev/full", "w") as full:
        assert run(code, str(tmp_path / "f"), stderr=full).returncode == 0
    assert (tmp_path / "f").read_text() == signal.SIGHUP.name
