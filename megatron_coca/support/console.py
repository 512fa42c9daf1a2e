"""Log lines and progress on standard error. A terminal shows progress in place. Other outputs get timed lines.

Results are printed on standard output, without this module.
"""

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Self, TypeVar

from megatron_coca.support.plain_text import plain

if TYPE_CHECKING:  # rich takes 0.1 s to import, and only a terminal needs it
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

Element = TypeVar("Element")

TIME = "%Y-%m-%d %H:%M:%S"
FIRST_GAP, LONGEST_GAP = 10.0, 300.0
"""Seconds between a task's progress lines if there is no terminal: the first gap, and the longest one. The gap doubles
after each line.
"""
SHORT = 1.0
"""A task that takes fewer seconds writes no final line."""
SHORTEST_BAR, LONGEST_BAR = 6, 30
"""Smallest and largest width of a progress bar, in columns."""
BEFORE_BAR = 3
"""Number of parts of a progress line that have priority over the bar."""
SCALED = ("B", "characters")
"""Units for which amounts are shown with three significant digits."""


def on_terminal() -> bool:
    """Return whether standard error is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@cache
def terminal() -> "Console":
    """Return the terminal. Its cursor is never hidden, because a killed process could not show it again."""
    from rich.console import Console

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    return Terminal(
        stderr=True,
        force_terminal=True,
        force_interactive=True,
        force_jupyter=False,
        soft_wrap=True,
        markup=False,
        emoji=False,
        highlight=False,
    )


def display(renderable: "RenderableType") -> "Live":
    """Show an object on the terminal until it is stopped, below all lines that this process writes."""
    from rich.live import Live

    shown = Live(renderable, console=terminal(), refresh_per_second=2, redirect_stdout=sys.stdout.isatty())
    shown.start(refresh=True)
    atexit.register(shown.stop)  # for a generator that is never closed
    return shown


def write(text: str) -> None:
    """Write permanent lines, on a terminal above the redrawn area, elsewhere with a timestamp."""
    text = plain(text)
    if on_terminal():
        terminal().print(text)
    else:
        now = time.strftime(TIME)
        sys.stderr.write(
            "".join(f"{now} {line}\n" for line in text.splitlines())
        )  # a single call, because ranks share the stream
        sys.stderr.flush()


class Handler(logging.Handler):
    """Handler that writes log lines with `write`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write(self.format(record))
        except Exception:  # as in logging's own handlers, a message that cannot be printed must not end the program
            self.handleError(record)


def set_up_logging(active: bool) -> None:
    """Log this package to standard error: warnings on every rank, other messages only if `active`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[Handler()])
    logging.getLogger("megatron_coca").setLevel(logging.INFO if active else logging.WARNING)


def short(value: float) -> str:
    """Format a number with three significant digits, such as 12.3k."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1.0, ""))
    return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:.0f}{unit}"


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds (1:02:03), or from one day on as days and hours (2d 1h)."""
    days, rest = divmod(round(seconds), 86400)
    return f"{days}d {rest // 3600}h" if days else str(timedelta(seconds=rest))


class Progress:
    """Progress of one task, shown inside its `with` block.

    On a terminal, progress is one line with a bar. Text that does not fit is left out. Elsewhere, there is a line at
    the start, lines at growing intervals, and a line at the end unless the task was short.

    Attributes:
        title: the name of the task.
        total: the amount of work; None if unknown.
        unit: the unit of the work, such as documents; B for bytes.
        done: the amount of finished work; a resumed task starts above 0.
        details: further parts of the progress line, the most important first.
    """

    def __init__(self, title: str, total: float | None = None, unit: str = "", done: float = 0, show: bool = True):
        self.title, self.total, self.unit, self.done = title, total, unit, done
        self.details: Sequence[str] = ()
        self._show, self._first = show, done
        self._live: Live | None = None
        self._began, self._ends, self._gap, self._due = time.monotonic(), math.nan, FIRST_GAP, math.inf

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._show and on_terminal():
            self._live = display(self)
        elif self._show:
            write(f"{self.title}: {self._amount()}" if self.total is not None else self.title)
            self._due = self._began + self._gap
        return self

    def begin(self, title: str) -> None:
        """Change the title to the next part of the task."""
        if title != self.title:
            self.title = title
            if self._live is not None:
                self._live.refresh()  # refresh now, because the task may hold the GIL later
            elif self._show:
                write(title)

    def advance(self, count: float = 1) -> None:
        """Add to the finished work."""
        self.done += count
        if (now := time.monotonic()) >= self._due:
            self._gap = min(2 * self._gap, LONGEST_GAP)
            self._due = now + self._gap
            write(f"{self.title}: {', '.join(self._texts())}")

    def remaining(self, seconds: float) -> None:
        """Set the remaining time, which is otherwise estimated from the finished work."""
        self._ends = time.monotonic() + seconds

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._show and (seconds := time.monotonic() - self._began) >= SHORT:
            write(f"{self.title}: {' in '.join(filter(None, (self._amount(), duration(seconds))))}")

    def _amount(self) -> str:
        if self.total is None and not self.done:
            return ""
        amounts = [self.done] if self.total is None else [self.done, self.total]
        texts = [short(amount) if self.unit in SCALED else str(math.floor(amount)) for amount in amounts]
        return "/".join(texts) + (self.unit if self.unit == "B" else f" {self.unit}" if self.unit else "")

    def _time(self) -> str:
        """Return the remaining time, or the time since the start."""
        now = time.monotonic()
        left, done = self._ends - now, self.done - self._first
        if math.isnan(left) and self.total is not None and done > 0:
            left = (now - self._began) / done * (self.total - self.done)
        finished = self.total is not None and self.done >= self.total
        return duration(now - self._began) if math.isnan(left) or finished else f"{duration(max(0.0, left))} left"

    def _texts(self) -> list[str]:
        return [text for text in (self._amount(), self._time(), *self.details) if text]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        width = options.max_width - 1  # terminals differ in the position after a character in the last column
        texts, title = self._texts(), Text(plain(self.title))
        room = width - min(title.cell_len, width // 2) - bool(title)
        bar = 1 + SHORTEST_BAR if self.total is not None else 0
        while texts and sum(map(len, texts)) + len(texts) - 1 + bar * (len(texts) > BEFORE_BAR) > room:
            texts.pop()
        room = width - sum(map(len, texts)) - len(texts)
        title.truncate(max(0, room), overflow="ellipsis")
        columns = min(LONGEST_BAR, room - title.cell_len - bool(title))
        parts = [title, *map(Text, texts)] if title else [Text(text) for text in texts]
        if self.total is not None and columns >= SHORTEST_BAR:
            full, empty = "━─" if (sys.stderr.encoding or "utf-8").lower().startswith("utf") else "#-"
            filled = round(columns * min(1.0, self.done / max(self.total, 1)))
            parts.insert(1 + bool(title), Text.assemble((full * filled, "cyan"), (empty * (columns - filled), "dim")))
        yield Text(" ", no_wrap=True, overflow="crop").join(parts)


def track(items: Iterable[Element], title: str, total: int, unit: str, show: bool = True) -> Iterator[Element]:
    """Yield items and show progress. An item counts as finished when the next one is requested."""
    with Progress(title, total, unit, show=show) as progress:
        for item in items:
            yield item
            progress.advance()
