"""The training loop: steps, what is reported and saved between them, and what follows from a step that goes wrong."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.checkpoints.errors import UnreadableError
from megatron_coca.config import BatchSizes
from megatron_coca.config.training import learning_rate
from megatron_coca.data import Batch, Blend, Loader
from megatron_coca.training import engine as dist
from megatron_coca.training.collectives import from_main
from megatron_coca.training.corpus import Corpus, Layout, mixture_figures, validate
from megatron_coca.training.engine import Engine, StepResult
from megatron_coca.training.exit_status import Diverged, Preempted, Preemption, Unsaved
from megatron_coca.training.loss_guard import DataSkips, LossGuard, Verdict
from megatron_coca.training.reporting import Monitor, StepFigures
from megatron_coca.training.resume import Choice, first_valid, quarantine_newer
from megatron_coca.training.saving import Checkpoints, is_due
from megatron_coca.training.topology import Topology
from megatron_coca.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """How a step is divided: batch sizes of one rank and of all, and the grid of ranks."""

    sizes: BatchSizes
    topology: Topology

    def layout(self, rank: int) -> Layout:
        """What a loader needs to know: ranks that hold one model between them read the same samples."""
        return self.sizes.total, self.sizes.micro, self.topology.coordinates(rank).data, self.topology.data


class Trainer:
    """One run in one process; all ranks do the same in the same order.

    Attributes:
        step: completed optimizer steps.
    """

    def __init__(
        self,
        corpus: Corpus,
        engine: Engine,
        checkpoints: Checkpoints,
        shape: Shape,
        preemption: Preemption,
        watchdog: Watchdog,
    ) -> None:
        self._corpus, self._engine, self._checkpoints = corpus, engine, checkpoints
        self._shape, self._layout = shape, shape.layout(dist.rank())
        self._preemption, self._watchdog = preemption, watchdog
        self._guard, self._skips = LossGuard(corpus.config.faults), DataSkips()
        self._skipped = 0
        self._note: str | None = None
        self._start_figures: Mapping[str, float] = {}
        self._unvalidated = self._leaving = False
        self.step = self._saved = 0

    def restore(self, folder: Path) -> None:
        """Go to where the checkpoint in `folder` was taken."""
        meta = self._checkpoints.restore(folder)
        progress = meta["progress"]
        self.step = self._saved = int(meta["step"])
        self._guard.restore(progress["guard"])
        self._skips, self._skipped = DataSkips.restore(progress["skips"]), int(progress["skipped"])
        self._unvalidated = bool(progress.get("unvalidated", False))

    def report_at_start(self, figures: Mapping[str, float]) -> None:
        """Report figures, by name, with the step that `run` begins at."""
        self._start_figures = figures

    def run(self) -> None:
        """Train to the last step of this launch, and save.

        Raises:
            Stopped: by a signal or by the loss guard, after saving what is good.
            CheckpointError: a checkpoint could not be written.
        """
        schedule, logging_keys = self._corpus.config.schedule, self._corpus.config.logging
        assert schedule.train_iters is not None
        last = min(schedule.train_iters, logging_keys.exit_interval or schedule.train_iters)
        if self.step >= last and not self._unvalidated:
            logger.info(
                "nothing to do: step %d is reached already (train_iters or exit_interval is %d)", self.step, last
            )
        while self.step < last or self._unvalidated:
            self._until(last)
        self._save()
        self._checkpoints.wait()

    def _until(self, last: int) -> None:
        """Train to step `last`, or to where the run is rolled back."""
        tokens = self._shape.sizes.total * self._corpus.config.model.seq_length
        monitor = Monitor(self._corpus.config, self.step, tokens, dist.gather_floats, dist.rank(), self._skipped)
        monitor.watch(self._engine.module)
        if self._start_figures:
            monitor.report(self.step, self._start_figures)
            self._start_figures = {}
        if self._note is not None:
            monitor.note(self.step, self._note)
            self._note = None
        try:
            with open_loader(self._corpus, self._corpus.train, self._layout) as loader:
                going = self._between(monitor) if self._unvalidated else True
                while going and self.step < last:
                    verdict = self._one_step(loader, monitor)
                    going = self._go_on(verdict, monitor)
        finally:
            monitor.close()

    def _one_step(self, loader: Loader, monitor: Monitor) -> Verdict:
        config, step = self._corpus.config, self.step
        assert config.optimizer.lr is not None
        with monitor.waiting():
            batches = loader.micro_batches(self._skips.position(step))
        rate = learning_rate(step, config.optimizer.lr, config.schedule)
        result = self._engine.train_step(batches, rate, self._guard.limits())
        verdict = self._guard.observe(step, result.loss, result.grad_norm)
        self.step, self._skipped = step + 1, self._skipped + result.skipped
        self._watchdog.beat(f"step {self.step}")
        monitor.stepped(self.step, self._figures(result, rate))
        if verdict.reason is not None:
            monitor.note(self.step, f"{verdict.reason}: {verdict.kind}")
        return verdict

    def _figures(self, result: StepResult, rate: float) -> StepFigures:
        return StepFigures(result.loss, result.grad_norm, rate, result.skipped, self._engine.loss_scale)

    def _go_on(self, verdict: Verdict, monitor: Monitor) -> bool:
        """What is due between two steps; False where the run was rolled back."""
        if verdict.kind == "stop":
            self._checkpoints.wait()
            raise Diverged(f"stopped at step {self.step}: {verdict.reason}; {self._newest()}")
        if verdict.kind == "rollback":
            self._roll_back(verdict)
            return False
        config = self._corpus.config
        self._unvalidated = self._finished() or self.step % config.logging.eval_interval == 0
        return self._between(monitor)

    def _between(self, monitor: Monitor) -> bool:
        """Validate and save where these are due, or save and leave where a signal asks for it."""
        lost, occupied = self._look_at_folder()
        asked = self._preemption.requested is not None
        self._leaving, failed, lost, occupied = dist.anyone((asked, self._checkpoints.failed, lost, occupied))
        if lost:
            self._save_anew(occupied)
        if failed:
            self._checkpoints.wait()
        if self._unvalidated and not self._leaving:
            self._validate(monitor)
        if self._leaving or is_due(self.step, self._corpus.config.checkpoint):
            with monitor.saving():
                self._save()
        if self._leaving:
            self._leave(monitor)
        return True

    def _look_at_folder(self) -> tuple[bool, bool]:
        """Once in a report interval, on the first rank: whether the folder of `save` is no longer the one that the run
        began with, and whether another one in its place holds checkpoints. Warns of a save that takes very long.
        """
        if self.step % self._corpus.config.logging.log_interval or not dist.is_main():
            return False, False
        self._checkpoints.warn_if_slow()
        return self._checkpoints.folder_lost()

    def _save_anew(self, occupied: bool) -> None:
        """The checkpoints are gone: save what is in memory, the only copy, and stop.

        Raises:
            CheckpointError: always.
        """
        save = self._corpus.config.checkpoint.save
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            logger.warning("%s", error)
        if occupied:
            raise CheckpointError(
                f"{save}: was deleted while this run trained into it, and another folder with checkpoints lies in its place; "
                f"this run stopped at step {self.step} and has saved nothing there. Put its own folder back, or choose "
                "another one"
            )
        self._saved = -1
        self._save()
        self._checkpoints.wait()
        raise CheckpointError(
            f"{save}: was deleted or moved while this run trained into it; step {self.step} is saved there again, its "
            "earlier checkpoints are gone. Start the run again, or put the folder back"
        )

    def _leave(self, monitor: Monitor) -> None:
        with monitor.saving():
            self._checkpoints.wait()
        unsaved = self._corpus.config.checkpoint.save is None
        who = self._preemption.requested or "on another rank"
        raise (Unsaved if unsaved else Preempted)(f"asked to leave ({who}); {self._newest()}")

    def _finished(self) -> bool:
        return self.step == self._corpus.config.schedule.train_iters

    def _validate(self, monitor: Monitor) -> None:
        """Report the losses of held-out data, or nothing where a signal comes meanwhile: a resumed run does it then."""
        evaluator = _Beating(self._engine, self._watchdog, self._preemption)
        try:
            with monitor.validating():
                losses = validate(self._corpus, evaluator, self._layout, open_loader)
        except _AskedToLeaveError:
            self._leaving = True
            return
        self._unvalidated = False
        if self._finished():
            reached = self._skips.position(self.step) * self._shape.sizes.total
            monitor.report(self.step, mixture_figures(self._corpus.train.mixture(reached)))
        monitor.validated(self.step, losses)

    def _save(self) -> None:
        if self.step <= self._saved:
            return
        self._watchdog.beat(f"saving step {self.step}")
        progress = {"guard": self._guard.state(), "skips": self._skips.state(), "skipped": self._skipped}
        progress["unvalidated"] = self._unvalidated
        self._checkpoints.save(self.step, progress)
        self._saved = self.step
        self._watchdog.beat(f"step {self.step} is handed to be saved")

    def _roll_back(self, verdict: Verdict) -> None:
        """Go back to the newest checkpoint before the bad steps, and leave out their data from there on."""
        self._checkpoints.wait()
        config = self._corpus.config
        first_bad = self.step - 1 if verdict.first_bad is None else verdict.first_bad
        assert config.checkpoint.save is not None
        save = Path(config.checkpoint.save)
        self._watchdog.beat("rolling back")
        # What the first rank sees counts: a shared file system may show others an older list.
        steps = from_main(lambda: rollback_order(native.begun_steps(save), first_bad, self.step - 1))
        try:
            chosen = first_valid([native.step_folder(save, step) for step in steps], self._watchdog.beat)
        except UnreadableError:
            raise
        except CheckpointError as failure:
            if dist.is_main():
                logger.warning("%s", failure)
            chosen = Choice(None)
        folder, last_bad = chosen.folder, self.step - 1
        if folder is None:
            raise Diverged(
                f"step {self.step}: {verdict.reason}; there is no intact checkpoint from before to roll back to"
            )
        newest = int(native.read_json(folder / native.META)["step"])
        self._note = f"rolled back from step {self.step} to step {newest}: {verdict.reason}"
        counted, skips, skipped = self._guard, self._skips, self._skipped
        self._guard = LossGuard(config.faults)
        self.restore(folder)
        counted.rolled_back(self._guard.state())
        self._guard, self._skipped = counted, skipped
        self._skips = skips.after_rollback(newest, first_bad, last_bad, config.faults.rollback_margin)
        quarantine_newer(config.checkpoint, chosen)

    def _newest(self) -> str:
        save = self._corpus.config.checkpoint.save
        steps = native.steps(Path(save)) if save is not None else []
        return f"step {steps[-1]} is saved" if steps else "nothing is saved"


def rollback_order(steps: Sequence[int], first_bad: int, last: int) -> list[int]:
    """In which order the checkpoints of `steps` are tried: from before the first bad step, the newest first, then those
    up to step `last`.

    Where only checkpoints from between the bad steps are left, these will do: skipped steps have changed no weight.
    """
    before = [step for step in steps if step <= first_bad]
    between = [step for step in steps if first_bad < step <= last]
    return [*reversed(before), *reversed(between)]


class _AskedToLeaveError(Exception):
    """A signal came during a validation, on this rank or another."""


class _Beating:
    """An evaluator that tells the watchdog of every batch, and asks all ranks before each whether to go on."""

    def __init__(self, engine: Engine, watchdog: Watchdog, preemption: Preemption) -> None:
        self._engine, self._watchdog, self._preemption = engine, watchdog, preemption

    def mean_loss(self, micro_batches: Sequence[Batch]) -> float:
        if dist.anyone((self._preemption.requested is not None,))[0]:
            raise _AskedToLeaveError
        self._watchdog.beat("validation")
        return self._engine.mean_loss(micro_batches)


def open_loader(corpus: Corpus, blend: Blend, layout: Layout) -> Loader:
    """A loader of one of the corpus's blends.

    Ids in the embedding's padding are refused too: no tokenizer of the configured vocabulary gives them.
    """
    config = corpus.config
    options: dict[str, Any] = {"packing": corpus.packing, "num_workers": config.data.num_workers}
    return Loader(blend, *layout, vocab_size=config.model.vocab_size, **options)
