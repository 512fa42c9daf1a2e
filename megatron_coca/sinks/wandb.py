"""Weights & Biases."""

import logging
from functools import partial
from typing import Any

from megatron_coca.sinks.declaration import (
    Metrics,
    MetricSink,
    RunFacts,
    SentSteps,
    SinkOption,
    SinkSetupError,
    register_sink,
)
from megatron_coca.sinks.waiting import SECONDS, within
from megatron_coca.support.plain_text import masked

logger = logging.getLogger(__name__)


@register_sink
class WandB(MetricSink):
    """Sends metrics to Weights & Biases. If the server does not answer, or with WANDB_MODE=offline, the metrics stay on
    disk.

    A resumed run keeps its id, and does not send repeated steps again, because wandb cannot replace logged values.
    """

    name = "wandb"
    key = "use_wandb"
    extra = "logging"
    record = "wandb.json"
    options = (
        SinkOption("project", "text", key="wandb_project"),
        SinkOption("group", "text", key="wandb_group"),
        SinkOption("run_name", "text", key="wandb_run_name"),
        SinkOption("team", "text", key="wandb_team"),
        SinkOption("host", "text", key="wandb_host"),
    )

    def __init__(
        self, run: RunFacts, project: str, group: str | None, run_name: str | None, team: str | None, host: str | None
    ) -> None:
        import wandb  # optional dependency

        self._steps = SentSteps(WandB, "use_wandb", run)
        server: dict[str, Any] = {"base_url": host} if host else {}
        begin = partial(
            wandb.init,
            project=project,
            group=group,
            name=run_name,
            entity=team,
            config=dict(run.config),
            id=self._steps.id,
            resume="allow" if self._steps.id else None,
            allow_val_change=True if self._steps.id else None,
        )
        try:
            self._run = begin(settings=wandb.Settings(init_timeout=SECONDS, **server))
        except ValueError as error:  # from pydantic, which validates wandb's settings and variables
            reason = masked(" ".join(str(error).split()))[:300]
            raise SinkSetupError(
                f"wandb_host or a variable WANDB_* is invalid ({reason}); write addresses with https://"
            ) from error
        except (wandb.errors.Error, OSError) as error:
            # wandb has retried until `init_timeout`. An unreachable server (CommError, OSError) is not
            # a user error, and a resumed run must not stop because of wandb.
            if not (run.start or isinstance(error, wandb.errors.CommError | OSError)):
                raise SinkSetupError(f"{error}; log in with `wandb login`, or set WANDB_MODE=offline") from error
            self._run = begin(mode="offline", settings=wandb.Settings(**server))
            logger.warning("use_wandb: %s; metrics stay on disk, so send them later with `%s`", error, self._sync())

    def report(self, step: int, metrics: Metrics) -> None:
        if step > self._steps.last:
            self._run.log({name: value for name, value in metrics.items() if value is not None}, step=step)
            self._steps.sent(self._run.id, step)

    def close(self) -> None:
        try:
            within(SECONDS, "wandb", self._run.finish)
        except TimeoutError:
            logger.warning("use_wandb: some metrics are not sent yet; send them later with `%s`", self._sync())

    def _sync(self) -> str:
        """Return the shell command that sends the metrics on disk to the server."""
        return f"wandb sync {self._run.settings.sync_dir}"
