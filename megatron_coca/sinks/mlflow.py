"""MLflow."""

import logging
import math
import time
from typing import Any

from megatron_coca.sinks.declaration import Metrics, MetricSink, RunFacts, SentSteps, SinkOption, register_sink
from megatron_coca.sinks.waiting import SECONDS, within

logger = logging.getLogger(__name__)

MOST_PARAMETERS, MOST_LETTERS = 100, 6000
"""Maximum number of parameters in a request, and of characters in a value."""


@register_sink
class MLflow(MetricSink):
    """Sends metrics, and notes as tags, to an MLflow server or a local store. Threads of the library send them.

    A resumed run keeps its id, and does not send repeated steps again, because MLflow keeps every value.
    """

    name = "mlflow"
    extra = "mlflow"
    record = "mlflow.json"
    options = (
        SinkOption("tracking_uri", "text", "Address of the server, or a local store; null: the library's default."),
        SinkOption("experiment", "text", "Experiment; it is created if it does not exist.", default="Default"),
        SinkOption("run_name", "text", "Name of the run; null: MLflow chooses one."),
    )

    def __init__(self, run: RunFacts, tracking_uri: str | None, experiment: str, run_name: str | None) -> None:
        from mlflow import MlflowClient  # optional dependency

        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._steps = SentSteps(MLflow, "metric_sinks.mlflow", run)
        self._waiting: list[Any] = []
        self._run = within(SECONDS, "MLflow", lambda: self._begin(run, experiment, run_name))

    def _begin(self, run: RunFacts, experiment: str, run_name: str | None) -> str:
        """Continue the run at MLflow, or start a new one. Return its id."""
        from mlflow.entities import Param

        if self._steps.id is not None:
            self._client.update_run(self._steps.id, status="RUNNING")
            return self._steps.id
        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        created = str(self._client.create_run(number, run_name=run_name).info.run_id)
        parameters = [Param(key, str(value)[:MOST_LETTERS]) for key, value in run.config.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(created, params=parameters[first : first + MOST_PARAMETERS])
        return created

    def report(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        if step > self._steps.last:
            now = int(time.time() * 1000)
            finite = {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}
            self._send(metrics=[Metric(name, value, now, step) for name, value in finite.items()])
            self._steps.sent(self._run, step)

    def note(self, step: int, message: str) -> None:
        from mlflow.entities import RunTag

        self._send(tags=[RunTag(f"event_{step}", message)])

    def close(self) -> None:
        try:
            within(SECONDS, "MLflow", self._finish)
        except TimeoutError:
            logger.warning("metric_sinks.mlflow: the last metrics are not sent, because the server does not answer")

    def _send(self, **entries: Any) -> None:
        self._waiting.append(self._client.log_batch(self._run, synchronous=False, **entries))

    def _finish(self) -> None:
        for sent in self._waiting:
            sent.wait()
        self._client.set_terminated(self._run)
