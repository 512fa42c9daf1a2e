"""Sinks receive the metrics of a run. This file defines sinks and their declarations. It does not import PyTorch.

A sink is one class in one file: its attributes declare it, and its methods do the work. The sinks of this package are
in the files beside this one. A user's sink is in a file that `imports` names, and is declared in the same way.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.errors import why_not_written

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]
"""Metrics by name. None means that the metric has no value at this step, such as the norm of a skipped step."""


class SinkSetupError(ValueError):
    """The user must change the configuration of a sink. This error stops the run, even a resumed one."""


@dataclass(frozen=True)
class SinkOption:
    """One option of a sink.

    Attributes:
        kind: "text", "flag" (true or false), or "folder" (a folder to write to, which only one run may use at a time).
        meaning: the description in docs/config.md.
        key: the configuration key with the option's value; this key has its own description. If it is None, the option
            is in the mapping `metric_sinks.NAME`.
    """

    name: str
    kind: Literal["text", "flag", "folder"]
    meaning: str = ""
    default: Any = None
    required: bool = False
    key: str | None = None


@dataclass(frozen=True)
class RunFacts:
    """The run that reports to a sink.

    Attributes:
        folder: the folder for the metrics of the run.
        start: number of completed steps.
        known: number of completed steps that have metrics in the folder: `start`, or 0 if the folder has no metrics of
            this run.
        id: the id of the run.
        config: every key of the configuration by its dotted name, without passwords in URLs.
    """

    folder: Path
    start: int
    known: int
    id: str | None
    config: Mapping[str, Any]


class MetricSink:
    """Receives metrics (`report`) and one-line messages (`note`), each with the number of completed steps.

    Only rank 0 has sinks. The sink is created with the run and the values of its options, as `Sink(run, **options)`.
    `SinkSetupError` stops the run. Any other error stops only a new run; a resumed run continues without the sink.

    Attributes:
        name: the name in `metric_sinks`.
        options: the options of the sink.
        key: the configuration key that selects the sink. If it is None, `metric_sinks` selects it.
        extra: the extra of this package with the sink's library.
        record: a file in the run's folder with the run's id in another service. A copy of a run deletes it.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[SinkOption, ...]] = ()
    key: ClassVar[str | None] = None
    extra: ClassVar[str | None] = None
    record: ClassVar[str | None] = None

    def advance(self) -> None:
        """Count one completed step."""

    def report(self, step: int, metrics: Metrics) -> None:
        raise NotImplementedError

    def note(self, step: int, message: str) -> None:
        """Ignore the message, because the console and most services show the log anyway."""

    def close(self) -> None:
        raise NotImplementedError


SINKS: dict[str, type[MetricSink]] = {}
"""Sinks that a configuration can select, by name. The console and metrics.jsonl are always used."""
SinkClass = TypeVar("SinkClass", bound=type[MetricSink])


def register_sink(sink: SinkClass) -> SinkClass:
    """Declare a sink. This is a decorator for its class. A sink that a user has declared earlier under the same name is
    replaced.

    Raises:
        ValueError: a sink of this package has the name.
    """
    known, own = SINKS.get(sink.name), __name__.rpartition(".")[0]
    if known is not None and known.__module__.startswith(f"{own}."):
        raise ValueError(f"metric_sinks: {sink.name} is a built-in sink; use another name")
    SINKS[sink.name] = sink
    return sink


class SentSteps:
    """The file `record` of a sink. It contains the run's id in another service, and the last step that was sent to it.

    A resumed run keeps the id, and does not send repeated steps again, because such a service keeps every value.

    Attributes:
        id: the id of the run in the service, or None if the run is new there.
        last: the last step that has been sent.
    """

    def __init__(self, sink: type[MetricSink], key: str, run: RunFacts) -> None:
        """`key` is the configuration key for messages. Raises SinkSetupError if the file contains no id."""
        assert sink.record is not None
        self._path, self._key, self._warned = run.folder / sink.record, key, False
        self.id: str | None = None
        self.last = 0
        if run.known and self._path.is_file():
            self.id, self.last = self._read(sink.name)

    def _read(self, name: str) -> tuple[str, int]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return str(content["id"]), int(content["step"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SinkSetupError(
                f"{self._path} does not contain a run id ({error}); delete the file to start a new {name} run"
            ) from error

    def sent(self, run: str, step: int) -> None:
        """Record that the metrics of a step are sent. A failed write is only logged, as a warning."""
        try:  # without waiting for the disk, because this happens at every report
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._path, json.dumps({"id": run, "step": step}), durable=False)
        except OSError as error:
            if not self._warned:
                logger.warning("%s: %s: %s", self._key, self._path, why_not_written(error, "choose another log_dir"))
            self._warned = True
