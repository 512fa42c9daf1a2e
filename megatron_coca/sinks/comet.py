"""Comet."""

import json
import logging
from typing import Any

from megatron_coca.sinks.declaration import Metrics, MetricSink, RunFacts, SentSteps, SinkOption, register_sink
from megatron_coca.sinks.waiting import SECONDS, within

logger = logging.getLogger(__name__)

NOT_COLLECTED: dict[str, Any] = {
    "display_summary_level": 0,
    "log_code": False,
    "log_graph": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "parse_args": False,
    "auto_output_logging": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
}
"""Settings with which the library prints and sends nothing by itself."""


@register_sink
class Comet(MetricSink):
    """Sends only metrics, notes and the configuration to Comet. The library collects nothing else.

    A resumed run keeps its id, and does not send repeated steps again, because Comet keeps every value.
    """

    name = "comet"
    extra = "comet"
    record = "comet.json"
    options = (
        SinkOption("workspace", "text", "Workspace; null: the default of the account."),
        SinkOption("project", "text", "Project.", default="coca"),
        SinkOption("run_name", "text", "Name of the experiment; null: Comet chooses one."),
        SinkOption("folder", "folder", "Store everything in this folder, for `comet upload`; null: send it."),
    )

    def __init__(
        self, run: RunFacts, workspace: str | None, project: str, run_name: str | None, folder: str | None
    ) -> None:
        import comet_ml  # optional dependency

        self._steps = SentSteps(Comet, "metric_sinks.comet", run)
        keys = comet_ml.ExperimentConfig(name=run_name, offline_directory=folder, **NOT_COLLECTED)
        self._experiment = within(
            SECONDS,
            "Comet",
            lambda: comet_ml.start(
                workspace=workspace,
                project_name=project,
                experiment_key=self._steps.id,
                mode="get" if self._steps.id else "create",
                online=folder is None,
                experiment_config=keys,
            ),
        )
        if self._steps.id is None:
            self._experiment.log_parameters({key: _text(value) for key, value in run.config.items()})

    def report(self, step: int, metrics: Metrics) -> None:
        if step > self._steps.last:
            given = {name: value for name, value in metrics.items() if value is not None}
            self._experiment.log_metrics(given, step=step)
            self._steps.sent(self._experiment.get_key(), step)

    def note(self, step: int, message: str) -> None:
        self._experiment.log_text(message, step=step)

    def close(self) -> None:
        try:
            within(SECONDS, "Comet", self._experiment.end)
        except TimeoutError:
            logger.warning("metric_sinks.comet: some metrics are not sent yet; the library says how to send them")


def _text(value: object) -> object:
    """Return a mapping or a list as JSON text. The library would split it into one parameter for each value."""
    return json.dumps(value) if isinstance(value, dict | list) else value
