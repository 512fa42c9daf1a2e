"""What is written on a terminal of two widths, and off a terminal."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.support import console
from megatron_coca.support.console import Progress, duration, short, track
from tests.terminal import HIDDEN_CURSOR, on_terminal, screen

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")

TRAINING = """
TITLE = ""
import logging, sys, time
from megatron_coca.support import console
console.set_up_logging(True)
log = logging.getLogger("megatron_coca.some").info
log("before the bar")
with console.Progress(TITLE, 143000, done=1200) as bar:
    bar.details = ["loss 2.3456", "val 2.4567", "123k tok/s", "12.3GiB", "lr 0.000123", "grad 0.123"]
    bar.remaining(86399)
    for step in range(10):
        bar.advance()
        time.sleep(0.03)
        if step == 5:
            log("saved step %d", 1205)
            print("printed by a library")
            time.sleep(0.8)
    print("to stderr", file=sys.stderr)
log("after the bar")
"""
TASK = """
import sys, time
from megatron_coca.support.console import Progress
with Progress("RoFormer + CoCA + dynamic NTK with a long label, window 16384", 12, "documents") as progress:
    for number in range(12):
        progress.advance()
        if number == 6:
            print("ready", file=sys.stderr, flush=True)
            time.sleep({seconds})
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def shown(code: str, columns: int, **options: Any) -> tuple[str, list[str]]:
    status, written = on_terminal(python(code), columns, cwd=ROOT, **options)
    assert status == 0 and HIDDEN_CURSOR not in written, written
    return written, screen(written, columns)


def off_terminal(code: str, **environment: str) -> str:
    done = subprocess.run(python(code), cwd=ROOT, env=os.environ | environment, capture_output=True, check=True)
    return done.stderr.decode()


def test_lines_stay_above_a_bar_of_80_columns() -> None:
    written, lines = shown(TRAINING, 80)
    assert lines[:4] == ["before the bar", "saved step 1205", "printed by a library", "to stderr"]
    assert lines[5:] == ["after the bar", ""] and len(lines) == 7
    bar = re.fullmatch(r"1210/143000 ━*(─+) 23:59:5\d left loss 2.3456 val 2.4567 123k tok/s 12.3GiB", lines[4])
    assert bar and len(bar[1]) >= console.SHORTEST_BAR, lines[4]
    assert written.count("1200/143000") < 10, "drawn twice a second, not at every step"


def test_what_does_not_fit_is_dropped() -> None:
    assert re.fullmatch(r"1210/143000 23:59:5\d left loss 2.3456", shown(TRAINING, 40)[1][4])
    assert re.fullmatch(r"1210/143000 23:59:5\d left", shown(TRAINING, 30)[1][4])


@pytest.mark.parametrize(
    ("columns", "text"), [(80, "RoFormer + CoCA + dynamic NTK with a long label, windo… 12/12"), (40, "…")]
)
def test_a_title_is_shortened(columns: int, text: str) -> None:
    (line, *rest) = shown(TASK.format(seconds=0), columns)[1][1:]
    assert text in line and "12/12 documents" in line and rest == [""], line


def test_standard_output_elsewhere_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        lines = shown(TRAINING, 80, stdout=output.fileno())[1]
    assert (tmp_path / "output").read_text() == "printed by a library\n"
    assert "printed by a library" not in lines and "to stderr" in lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_cursor_is_never_hidden(number: signal.Signals) -> None:
    sent: list[int] = []

    def stop(process: subprocess.Popen[bytes], text: str) -> None:
        if "ready" in text and "7/12" in text and not sent:
            sent.append(number)
            process.send_signal(number)

    status, written = on_terminal(python(TASK.format(seconds=30)), 80, cwd=ROOT, during=stop)
    assert sent and status in (-number, 1) and HIDDEN_CURSOR not in written
    assert "ready" in screen(written, 80)


def test_children_and_nested_tasks_share_the_terminal() -> None:
    code = """
import subprocess, time
from megatron_coca.support.console import Progress
with Progress("outer", 2, "parts") as outer:
    subprocess.run(["echo", ""])
    subprocess.run(["echo", "a child"])
    with Progress("inner", 5, "things") as inner:
        inner.advance(5)
        time.sleep(0.6)
    outer.advance(2)
"""
    _, lines = shown(code, 40)
    assert "a child" in lines and any(line.startswith("inner 5/5 things") for line in lines)
    assert any(line.startswith("outer 2/2 parts") for line in lines)


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}])
def test_lines_off_a_terminal(environment: dict[str, str]) -> None:
    code = TRAINING.replace('TITLE = ""', 'TITLE = "coca"').replace('print("', 'log("').replace(", file=sys.stderr", "")
    written = off_terminal(code, **environment)
    assert "\r" not in written and "\x1b" not in written
    lines = written.splitlines()
    assert all(LINE.match(line) for line in lines), lines
    texts = [LINE.sub("", line) for line in lines]
    assert texts[:5] == ["before the bar", "coca: 1200/143000", "saved step 1205", "printed by a library", "to stderr"]
    assert re.fullmatch(r"coca: 1210/143000 in 0:00:\d\d", texts[5]) and texts[6:] == ["after the bar"]


def test_a_dumb_terminal_gets_lines() -> None:
    status, written = on_terminal(["env", "TERM=dumb", *python(TASK.format(seconds=0))], 200, cwd=ROOT)
    assert status == 0 and "\x1b" not in written and "0/12 documents" in written


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def messages(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [LINE.sub("", line) for line in capsys.readouterr().err.splitlines()]


def test_intervals_grow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock, done_at = Clock(monkeypatch), []
    with Progress("reading", 1000, "files") as progress:
        for _ in range(1000):
            clock.now += 2
            before = progress._due
            progress.advance()
            done_at += [clock.now] if progress._due != before else []
    assert done_at == [10, 30, 70, 150, 310, 610, 910, 1210, 1510, 1810]
    lines = messages(capsys)
    assert lines[:3] == [
        "reading: 0/1000 files",
        "reading: 5/1000 files, 0:33:10 left",
        "reading: 15/1000 files, 0:32:50 left",
    ]
    assert lines[-1] == "reading: 1000/1000 files in 0:33:20" and len(lines) == 12


def test_a_short_task_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    assert list(track("abc", "short", 3, "letters")) == ["a", "b", "c"]
    with Progress("silent", 3, show=False) as progress:
        progress.advance()
        progress.begin("other")
    with Progress("train", unit="B") as progress:
        progress.begin("train more")
        progress.advance(12345678)
        clock.now += 3
    assert messages(capsys) == ["short: 0/3 letters", "train", "train more", "train more: 12.3MB in 0:00:03"]


def test_a_resumed_task_estimates_from_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Progress("resumed", 100, done=90, show=False) as progress:
        assert progress._texts() == ["90/100", "0:00:00"]
        clock.now += 10
        progress.advance(5)
        assert progress._texts() == ["95/100", "0:00:10 left"]
        progress.remaining(90000)
        clock.now += 600
        assert progress._texts() == ["95/100", "1d 0h left"]
        progress.advance(5)
        assert progress._texts() == ["100/100", "0:10:10"]


def test_an_interrupted_generator_ends_its_display() -> None:
    code = """
import sys
from megatron_coca.support.console import track
kept = track(range(9), "kept", 9, "things")
next(kept)
for number in track(range(9), "read", 9, "things"):
    if number == 3:
        raise ValueError("wrong")
"""
    status, written = on_terminal(python(code), 80, cwd=ROOT)
    assert status == 1 and "ValueError: wrong" in screen(written, 80) and written.endswith("\n")


def test_numbers_are_short() -> None:
    assert [short(rate) for rate in (7.0, 999.0, 1234.0, 218e3, 4.2e6)] == ["7", "999", "1.23k", "218k", "4.2M"]
    assert [duration(seconds) for seconds in (0.4, 3661, 86399.9)] == ["0:00:00", "1:01:01", "1d 0h"]


def test_rich_is_imported_for_a_terminal_only() -> None:
    code = "import sys, megatron_coca.support.console as c; c.write('a'); print('rich' in sys.modules, file=sys.stderr)"
    assert off_terminal(code).splitlines()[-1] == "False"
