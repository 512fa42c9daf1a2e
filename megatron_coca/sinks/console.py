"""Progress and metrics on standard error."""

from collections.abc import Callable

from megatron_coca.sinks.declaration import Metrics, MetricSink, RunFacts
from megatron_coca.support.console import Progress, duration, on_terminal, short, write

PERPLEXITY = "validation_perplexity_"
"""Prefix of the perplexity metrics of `eval_windows`."""
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "validation_loss": ("validation loss", "{:.4f}".format),
    "grad_norm": ("grad norm", "{:.3g}".format),
    "lr": ("lr", "{:.3g}".format),
    "tokens_per_second": ("tokens/s", short),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_memory_gib": ("memory", "{:.2f}GiB".format),
}
"""Metrics on the console in this order, each with its label and format. Files contain all metrics."""


def shown(metrics: Metrics) -> dict[str, str]:
    """Return the formatted value of each metric that the console shows, by its label."""
    values = {name: metrics.get(name) for name in COLUMNS}
    texts = {COLUMNS[name][0]: COLUMNS[name][1](value) for name, value in values.items() if value is not None}
    windows = {name: value for name, value in metrics.items() if name.startswith(PERPLEXITY) and value is not None}
    return texts | {f"perplexity {name.removeprefix(PERPLEXITY)}": f"{value:.2f}" for name, value in windows.items()}


BAR: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "validation_loss": "val {:.4f}".format,
    "tokens_per_second": lambda rate: f"{short(rate)} tok/s",
    "peak_memory_gib": "{:.3g}GiB".format,
    "lr": "lr {:.3g}".format,
    "grad_norm": "grad {:.3g}".format,
}
"""Metrics beside the progress bar, each with its format. If there is not enough room, only the first ones appear."""


class Console(MetricSink):
    """Shows progress on standard error. On a terminal, it shows a progress bar, with one line above the bar for each
    validation. In other outputs, such as a job's log file, it writes one line per report.
    """

    def __init__(self, run: RunFacts) -> None:
        self._total, self._name = run.config["train_iters"], run.config["pos_emb"]
        self._latest: dict[str, float] = {}
        self._terminal = on_terminal()
        self._bar = Progress("", self._total, done=run.start, show=self._terminal)
        self._bar.__enter__()

    def advance(self) -> None:
        self._bar.advance()

    def report(self, step: int, metrics: Metrics) -> None:
        prefix = "validation_loss/"
        self._latest |= {name: value for name, value in metrics.items() if value is not None}
        self._bar.details = [text(self._latest[name]) for name, text in BAR.items() if name in self._latest]
        texts = [f"{label} {text}" for label, text in shown(metrics).items()]
        texts += [
            f"{name.removeprefix(prefix)} {value:.4f}"
            for name, value in metrics.items()
            if name.startswith(prefix) and value is not None
        ]
        if (remaining := metrics.get("eta_seconds")) is not None:
            self._bar.remaining(remaining)
            texts.append(f"ETA {duration(remaining)}")
        if texts and (not self._terminal or metrics.get("validation_loss") is not None):
            write(f"{self._name} step {step}/{self._total}: {', '.join(texts)}")

    def close(self) -> None:
        self._bar.__exit__()
