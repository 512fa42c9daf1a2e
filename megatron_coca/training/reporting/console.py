"""What a person sees: a progress bar on a terminal, a line per report anywhere else."""

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, Protocol

from tqdm import tqdm

from megatron_coca.config import Config
from megatron_coca.training.reporting.sinks import Figures, Sink

_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def _rate(value: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if value >= size), (1.0, ""))
    return f"{value / size:.3g}{unit}" if value < 999.5 * size else f"{value / size:.0f}{unit}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


class _Column(NamedTuple):
    """One figure as it is shown: its label and its text."""

    label: str
    text: Callable[[float], str]


COLUMNS: dict[str, _Column] = {
    "loss": _Column("loss", "{:.4f}".format),
    "validation_loss": _Column("validation loss", "{:.4f}".format),
    "grad_norm": _Column("grad norm", "{:.3g}".format),
    "lr": _Column("lr", "{:.3g}".format),
    "tokens_per_second": _Column("tokens/s", _rate),
    "mfu": _Column("MFU", "{:.1%}".format),
    "peak_memory_gib": _Column("memory", "{:.2f}GiB".format),
}
"""The figures that are shown, in this order; files have all of them."""

ETA = "eta_seconds"


def shown(figures: Figures) -> dict[str, str]:
    """Label and text of the figures that a person is shown."""
    known = {name: (column, figures.get(name)) for name, column in COLUMNS.items()}
    return {column.label: column.text(value) for column, value in known.values() if value is not None}


class Bar:
    """A progress bar with rate and remaining time, on standard error."""

    def __init__(self, config: Config, start: int) -> None:
        self._latest: dict[str, str] = {}
        self._bar = tqdm(
            total=config.schedule.train_iters,
            initial=start,
            desc=config.position.pos_emb,
            unit="step",
            mininterval=1.0,
            dynamic_ncols=True,
        )

    def advance(self) -> None:
        """One step is done."""
        self._bar.update()

    def report(self, step: int, figures: Figures) -> None:
        self._latest |= shown(figures)
        self._bar.set_postfix(self._latest, refresh=False)

    def note(self, step: int, message: str) -> None:
        """The log tells it, above the bar."""

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A line per report, for log files: a bar there is thousands of lines that overwrite nothing."""

    def __init__(self, config: Config, start: int) -> None:
        self._total, self._name = config.schedule.train_iters, config.position.pos_emb

    def advance(self) -> None:
        """Only reports are shown."""

    def report(self, step: int, figures: Figures) -> None:
        parts = [f"{label} {text}" for label, text in shown(figures).items()] + _sources(figures)
        remaining = figures.get(ETA)
        parts += [f"ETA {_duration(remaining)}"] if remaining is not None else []
        if parts:
            print(f"{self._name} step {step}/{self._total}: {', '.join(parts)}", file=sys.stderr, flush=True)

    def note(self, step: int, message: str) -> None:
        """The log tells it."""

    def close(self) -> None:
        """Nothing is held."""


class Console(Sink, Protocol):
    """Shows progress."""

    def advance(self) -> None:
        """One step is done."""
        ...


def open_console(config: Config, start: int) -> Console:
    """The bar where standard error is a terminal, else lines."""
    return Bar(config, start) if sys.stderr.isatty() else Lines(config, start)


class AboveBar(logging.Handler):
    """Prints log lines on standard error above a progress bar, where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # logging's own rule: a message that cannot be printed must not end the program
            self.handleError(record)


def set_up_logging(active: bool) -> None:
    """Messages of this package on standard error, from the first rank only."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[AboveBar()])
    logging.getLogger("megatron_coca").setLevel(logging.INFO if active else logging.WARNING)


def _sources(figures: Figures) -> list[str]:
    prefix = "validation_loss/"
    return [
        f"{name.removeprefix(prefix)} {value:.4f}"
        for name, value in figures.items()
        if name.startswith(prefix) and value is not None
    ]
