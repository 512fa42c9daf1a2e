"""The training loop of a stage: steps, reports, validations and checkpoints."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.files import ServiceError
from megatron_coca.config.model import EXPERTS
from megatron_coca.data import Batch, Loader
from megatron_coca.data.mixture import mixture_figures
from megatron_coca.sinks.json_lines import is_validated
from megatron_coca.training.checkpointing.resume import StageStart
from megatron_coca.training.checkpointing.saving import Checkpoints, is_due
from megatron_coca.training.collectives import from_main
from megatron_coca.training.corpus import open_loader
from megatron_coca.training.engine import Engine, HeldOutLoss, StepResult
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine.routing import routing_figures
from megatron_coca.training.monitoring.loss_guard import LossGuard, Verdict
from megatron_coca.training.monitoring.monitor import IntervalMean, Monitor
from megatron_coca.training.opened_stages import OpenedStage
from megatron_coca.training.run_context import RunContext
from megatron_coca.training.sinks import run_folder
from megatron_coca.training.validation import validate
from megatron_coca.work.statuses import Diverged, Interrupted, Preempted, Unsaved

logger = logging.getLogger(__name__)


class _PreemptedDuringValidationError(Exception):
    """A signal arrived during a validation, on this or another rank."""


class Trainer:
    """The training loop of one process. All ranks make the same calls in the same order.

    Attributes:
        step: the number of completed optimizer steps.
    """

    def __init__(self, opened: OpenedStage, engine: Engine, checkpoints: Checkpoints, context: RunContext) -> None:
        self._stage, self._corpus, self._sizes = opened.stage, opened.corpus, opened.sizes
        self._config, self._engine, self._checkpoints = opened.corpus.config, engine, checkpoints
        # Ranks that share a model read the same samples, so the data layout has only data-parallel ranks.
        data_rank = context.topology.coordinates(dist.rank()).data
        self._layout = (self._sizes.total, self._sizes.micro, data_rank, context.topology.data)
        self._preemption, self._watchdog = context.preemption, context.watchdog
        self._lock = context.lock
        self._guard, self._skipped, self._unvalidated = LossGuard(self._config.faults), 0, False
        self._losses = IntervalMean(self._config.logging.log_interval)
        self.step, self._saved = 0, -1 if is_due(0, self._config.checkpoint) else 0

    def restore(self, how: StageStart) -> None:
        """Resume from a checkpoint. Raises CheckpointError like `Checkpoints.restore`."""
        meta = self._checkpoints.restore(how)
        progress = meta["progress"]
        self.step, self._skipped = int(meta["step"]), int(progress["skipped"])
        self._saved = self.step
        self._guard.restore(progress["guard"] | ({"losses": [], "norms": []} if how.new_losses else {}))
        self._losses.restore(progress["losses"])
        # The checkpoint was written before its step was validated, but another launch may have validated it since then.
        folder, run = run_folder(self._config), self._checkpoints.run
        self._unvalidated = progress["unvalidated"] and not from_main(lambda: is_validated(folder, self.step, run))

    def run(self) -> None:
        """Train until the last step of the stage or of this launch, and save.

        Raises:
            Stopped: a signal or the loss guard ended the run; the last valid state is saved.
            CheckpointError: a checkpoint could not be written.
        """
        last = self._config.logging.last_step(self.step, self._stage.last)
        tokens = self._sizes.total * self._config.model.seq_length
        if self.step >= last and not self._unvalidated:
            logger.info("nothing to do: step %d has already been reached (train_iters is %d)", self.step, last)
        if self.step < last or self._unvalidated:
            monitor = Monitor(
                self._config, self.step, tokens, dist.gather_floats, dist.rank(), self._skipped, self._checkpoints.run
            )
            if self.step == self._stage.first > 0:
                monitor.note(self.step, f"stage begins: {self._stage.text}")
            try:
                if self.step == 0:
                    self._save()  # if extra_save_iters contains 0
                with open_loader(self._corpus, self._corpus.train, self._layout) as loader:
                    if self._unvalidated:  # a validation was due when the run was stopped
                        self._validate_and_save(monitor)
                    while self.step < last:
                        self.train_step(loader, monitor)
            finally:
                monitor.close()
        self._save()
        try:
            self._checkpoints.wait()
        except ServiceError:
            if not dist.anyone((self._asked_to_stop(),))[0]:
                raise
            self._leave()

    def train_step(self, loader: Loader, monitor: Monitor) -> None:
        """Run one optimizer step: read its data, train, judge and report the result; then validate and save if due.

        Raises:
            Stopped: a signal or the loss guard ends the run.
        """
        with monitor.during("waiting"):
            micro_batches = loader.micro_batches(self.step)
        rate = self._stage.learning_rate(self.step)
        result = self._engine.train_step(micro_batches, rate, self._guard.limits())
        verdict = self._guard.observe(result.loss, result.grad_norm)
        self.step, self._skipped = self.step + 1, self._skipped + result.skipped
        self._watchdog.beat(f"step {self.step}")
        self._report(result, rate, verdict, monitor)
        if verdict.kind == "stop":
            self._checkpoints.wait()
            raise Diverged(f"stopped at step {self.step}: {verdict.reason}; {self._newest()}{self._earlier()}")
        self._unvalidated = self._finished() or self.step % self._config.logging.eval_interval == 0
        self._validate_and_save(monitor)

    def _report(self, result: StepResult, rate: float, verdict: Verdict, monitor: Monitor) -> None:
        """Report the metrics of the last step, and the loss guard's findings."""
        loss = self._losses.add(self.step, result.loss if result.labels else None, result.skipped)
        figures = {"loss": loss, "grad_norm": result.grad_norm, "lr": rate}
        if self._engine.loss_scale is not None:
            figures["loss_scale"] = self._engine.loss_scale
        if monitor.reports(self.step):
            named = enumerate(self._config.model.mlp_names)
            figures |= routing_figures(result.routing, [number for number, kind in named if kind == EXPERTS])
        monitor.stepped(self.step, figures, result.skipped)
        if verdict.reason is not None:
            monitor.note(self.step, f"{verdict.reason}: {verdict.kind}")
        if not result.labels:
            monitor.note(self.step, "no gradient, because no token of this step has a label that counts in the loss")

    def _validate_and_save(self, monitor: Monitor) -> None:
        """Validate and save if due; after a signal, save and end the run."""
        lost = self._lock.is_lost()
        preempted, failed, lost = dist.anyone((self._asked_to_stop(), self._checkpoints.failed, lost))
        if failed:
            self._checkpoints.wait(hurry=True)  # raises the error
        if lost:
            monitor.note(self.step, self._lock.retake())

        if self._unvalidated and not preempted:
            try:
                with monitor.during("validating"):
                    figures = validate(self._corpus, self._mean_loss, self._layout)
            except _PreemptedDuringValidationError:
                preempted = True  # the resumed run validates before it trains
            else:
                self._unvalidated = False
                if self._finished():
                    figures |= mixture_figures(self._corpus.mixture(self.step, self._sizes.total))
                if figures:  # a single call, so that a kill leaves all of them or none
                    monitor.report(self.step, figures)

        if preempted or is_due(self.step, self._config.checkpoint):
            with monitor.during("saving"):
                self._save()
        if preempted:
            with monitor.during("saving"):
                self._leave()

    def _asked_to_stop(self) -> bool:
        return self._preemption.requested is not None

    def _leave(self) -> NoReturn:
        """End the run after a signal to any rank. The next launch retries uploads that fail.

        Raises:
            Interrupted, Preempted, Unsaved: always.
        """
        try:
            self._checkpoints.wait()
        except ServiceError as failure:
            if dist.is_main():
                logger.warning("%s", failure)
        signal, newest = self._preemption.requested, self._newest()
        if dist.anyone((signal == "SIGINT",))[0]:
            raise Interrupted(f"interrupted ({signal or 'on another rank'}); {newest}")
        error = Unsaved if self._config.checkpoint.save is None else Preempted
        raise error(f"preempted ({signal or 'on another rank'}); {newest}")

    def _finished(self) -> bool:
        return self.step == self._stage.last

    def _mean_loss(self, micro_batches: Sequence[Batch]) -> HeldOutLoss:
        if dist.anyone((self._asked_to_stop(),))[0]:
            raise _PreemptedDuringValidationError
        self._watchdog.beat("validation")
        return self._engine.mean_loss(micro_batches)

    def _save(self) -> None:
        if self.step <= self._saved:
            return
        self._watchdog.beat(f"saving step {self.step}")
        progress = {
            "guard": self._guard.state(),
            "losses": self._losses.state(),
            "skipped": self._skipped,
            "unvalidated": self._unvalidated,
        }
        self._checkpoints.save(self.step, progress)
        self._saved = self.step
        self._watchdog.beat(f"step {self.step} is copied for saving")

    def _earlier(self) -> str:
        """Return the end of an error message: how to resume from a checkpoint before the bad steps. It is empty if
        there are no checkpoints.
        """
        save = self._config.checkpoint.save
        if save is None or not native.steps(Path(save)):
            return ""
        return (
            f". To resume from an earlier step, set load={save} iteration=STEP without auto_resume and, for example, a "
            "lower optimizer.params.lr; the run then moves later checkpoints to quarantine/"
        )

    def _newest(self) -> str:
        save = self._config.checkpoint.save
        steps = native.steps(Path(save)) if save is not None else []
        return f"step {steps[-1]} is saved" if steps else "nothing is saved"
