"""The sinks of a run: which ones its configuration selects, their folders, and what happens if one fails."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.config import Config, ConfigError
from megatron_coca.sinks import SINKS, Metrics, MetricSink, RunFacts, SinkSetupError
from megatron_coca.sinks.console import Console
from megatron_coca.sinks.json_lines import METRICS, OWNER, UNSAVED, JsonLines, continues
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.errors import why_not_written
from megatron_coca.support.plain_text import masked

logger = logging.getLogger(__name__)


def run_folder(config: Config) -> Path:
    """Return the folder for a run's metrics: `log_dir`, else `save`, else `UNSAVED`."""
    return Path(config.logging.log_dir or config.checkpoint.save or UNSAVED)


def unsaved_folder(number: int) -> Path:
    """Return the metrics folder of the `number`-th simultaneous run (from 1) without `log_dir` and `save`."""
    return UNSAVED if number == 1 else UNSAVED.with_name(f"{UNSAVED.name}_{number}")


class SelectedSink(NamedTuple):
    """A sink that a configuration selects.

    Attributes:
        key: the key of the configuration that selects it.
        options: the values of its options by name.
    """

    kind: type[MetricSink]
    key: str
    options: dict[str, Any]

    @property
    def folders(self) -> dict[str, str]:
        """The folders that the sink writes to, by the key that names them. Only one run at a time may use them."""
        return {
            option.key or f"{self.key}.{option.name}": self.options[option.name]
            for option in self.kind.options
            if option.kind == "folder" and self.options[option.name] is not None
        }


def selected_sinks(config: Config) -> Iterator[SelectedSink]:
    """Yield the sinks that the configuration selects, besides metrics.jsonl and the console."""
    values = config.flat()
    for kind in SINKS.values():
        if kind.key is not None and values[kind.key]:
            yield SelectedSink(kind, kind.key, {option.name: values[str(option.key)] for option in kind.options})
        elif (options := config.logging.metric_sinks.get(kind.name)) is not None:
            yield SelectedSink(kind, f"metric_sinks.{kind.name}", options)


def metric_folders(config: Config) -> dict[str, str]:
    """Return the folders for metrics, by the key that names them. Only one run at a time may use them."""
    folders = {} if config.logging.log_dir is None else {"log_dir": config.logging.log_dir}
    for sink in selected_sinks(config):
        folders |= sink.folders
    return folders


def adopt_metrics(folder: Path, known: str, own: str) -> None:
    """Let the run `own` continue the metrics of the run `known` in a copied folder. In external services, such as
    Weights & Biases, `own` starts as a new run. If the id of `own` cannot be written to the folder, this is logged as a
    warning, and `own` begins new metrics.
    """
    try:
        if (folder / OWNER).exists() and continues(folder, known):
            write_file(folder / OWNER, json.dumps({"run": own}) + "\n")
            for record in filter(None, (sink.record for sink in SINKS.values())):
                (folder / record).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: %s", folder / OWNER, why_not_written(error, "the run begins new metrics"))


def open_sinks(config: Config, start: int, run: str | None = None) -> list[MetricSink]:
    """Open all sinks of the run with the id `run`; `start` is the number of completed steps.

    Raises:
        ConfigError: a library is missing, a folder is not writable, or the login to a service fails.
    """
    folder = run_folder(config)
    values = json.loads(masked(json.dumps(config.flat())))
    facts = RunFacts(folder, start, start if continues(folder, run) else 0, run, values)
    try:
        opened: list[MetricSink] = [JsonLines(facts)]
    except OSError as error:
        raise ConfigError(f"log_dir: {error}; choose a writable folder") from error
    opened += filter(None, (_open(selected, facts) for selected in selected_sinks(config)))
    return [*opened, Console(facts)]  # last, because its bar is below the output of the other sinks


def _open(selected: SelectedSink, run: RunFacts) -> MetricSink | None:
    """Open a sink. If it fails in a resumed run, return None, because such a run must not stop."""
    kind, key, options = selected
    create: Callable[..., MetricSink] = kind
    try:
        return NonFatal(create(run, **options), key)
    except ImportError as error:
        extra = f"the extra: pip install 'megatron-coca[{kind.extra}]'" if kind.extra else "the package"
        raise ConfigError(f"{key}: {error}; install {extra}") from error
    except SinkSetupError as error:
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # each library has its own exceptions
        if not run.start:
            reason = f"{error}; choose a writable folder" if isinstance(error, OSError) else f"{error}; see its options"
            raise ConfigError(f"{key}: {reason}") from error
        logger.warning("%s: %s; training continues without it, and %s has all metrics", key, error, METRICS)
        return None


class NonFatal(MetricSink):
    """A sink that must not stop the training. Its first failure is logged as a warning and ends its use."""

    def __init__(self, sink: MetricSink, key: str) -> None:
        self._sink, self._key, self._failed = sink, key, False

    def report(self, step: int, metrics: Metrics) -> None:
        self._attempt(lambda: self._sink.report(step, metrics))

    def note(self, step: int, message: str) -> None:
        self._attempt(lambda: self._sink.note(step, message))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # each library has its own exceptions
            self._failed = True
            logger.warning(
                "%s: failed (%s); training continues without it, and %s has all metrics", self._key, error, METRICS
            )
