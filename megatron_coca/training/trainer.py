"""A training run in one process: its start, its steps, and the reporting and saving between them."""

import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.files import ServiceError
from megatron_coca.checkpoints.load import find_native
from megatron_coca.checkpoints.native import folder as native
from megatron_coca.config import BatchSizes, Config, RunStage, stage_at
from megatron_coca.data import Batch, Loader
from megatron_coca.model import assemble_model, choose_backends
from megatron_coca.support.console import set_up_logging
from megatron_coca.support.host_memory import keep_freed_memory
from megatron_coca.support.program import InputError
from megatron_coca.training import launch, saving
from megatron_coca.training.collectives import FolderLock, from_main, require_writable
from megatron_coca.training.corpus import (
    Corpus,
    mixture_figures,
    mixture_table,
    open_loader,
    repeated_sources,
    validation_note,
    with_train_iters,
)
from megatron_coca.training.engine import Engine, HeldOutLoss, build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.exit_status import CaughtSignals, Diverged, Interrupted, Preempted, Stopped, Unsaved
from megatron_coca.training.initial_model import initial_model
from megatron_coca.training.loss_guard import LossGuard
from megatron_coca.training.monitor import IntervalMean, Monitor
from megatron_coca.training.neox_resume import starts_from_neox, take_over
from megatron_coca.training.optimizer import build_optimizer, train_only_parts, trainable_share
from megatron_coca.training.remote_checkpoints import RemoteCheckpoints, use_local_folders
from megatron_coca.training.resume import (
    begins_optimizer,
    candidates,
    first_valid,
    quarantine_newer,
    refuse_other_run,
    verify_distributed,
)
from megatron_coca.training.run_stages import OpenedStage, open_stages
from megatron_coca.training.saving import Checkpoints, is_due
from megatron_coca.training.sinks import is_validated, run_folder
from megatron_coca.training.topology import Topology, rounded_sum
from megatron_coca.training.validation import check_validation, validate
from megatron_coca.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


def fit(config: Config, without_effect: Sequence[str] = ()) -> None:
    """Train in the process group of the environment, from step 0 or from a checkpoint, as the configuration says.

    `without_effect` are keys of GPT-NeoX that were set and have none; they are logged.

    Raises:
        ConfigError, DataError, CheckpointError, BackendError: an input cannot be used; nothing was overwritten.
        Stopped: the run ended in order before its last step; its `status` gives the reason.
    """
    launch.complete_environment(os.environ)
    launch.check_devices(config, os.environ)
    if not torch.cuda.is_available():
        keep_freed_memory()
        torch.set_num_threads(min(torch.get_num_threads(), launch.threads_per_process(os.environ)))
    # Signals end the process as usual until there is something to save: other ranks may never join.
    peers = dist.init_distributed(config.faults.collective_timeout, config.launch.join_timeout, watch=True)
    orderly = False
    try:
        set_up_logging(dist.is_main())
        chosen = [choose_backends(stage.config, dist.local_device()) for stage in config.run_stages()]
        backends = ", ".join(dict.fromkeys(name for names in chosen for name in names.values()))
        logger.info(launch.describe_devices(config, dist.world_size(), backends))
        if (note := launch.unused_gpus(config, dist.world_size())) is not None:
            logger.warning(note)
        if without_effect:
            logger.info("no effect here (docs/config.md): %s", ", ".join(without_effect))
        if (note := config.model.narrow_mlp) is not None:
            logger.warning(note)
        config, remotes = use_local_folders(config)
        lock = FolderLock(config.checkpoint.save)
        config = lock.choose_log_dir(config)
        watchdog = Watchdog(config.faults.watchdog_timeout, run_folder(config), dist.rank())
        answer = "stopping after this step, with a checkpoint if `save` is set; a second Ctrl-C ends the run at once"
        with CaughtSignals(answer=answer if dist.is_main() else None) as preemption, watchdog, lock:
            remotes.attend(watchdog.beat, lambda: preemption.requested is not None)
            _train(config, lock, remotes, preemption, watchdog)
        orderly = True
    except Exception as error:
        orderly = isinstance(error, Stopped)
        if not isinstance(error, Stopped | InputError):
            peers.explain(error)
        error.add_note(f"on rank {dist.rank()} of {dist.world_size()}, {socket.gethostname()}")
        raise
    finally:
        dist.shut_down()
        peers.leave(orderly)


def _train(
    config: Config, lock: FolderLock, remotes: RemoteCheckpoints, preemption: CaughtSignals, watchdog: Watchdog
) -> None:
    """Open the data, choose the checkpoint to resume from, and train the stages that are left."""
    topology = Topology.of(config.parallel, dist.world_size())
    if config.schedule.train_epochs is not None:
        config = with_train_iters(config, config.batch.resolve(topology.data))
    for stage in config.run_stages():
        stage.config.batch.resolve(topology.data)
    keys = config.checkpoint
    lock.take()  # if it exists, so that no other run changes it after it is read
    remotes.prepare()
    folders = [Path(text) for text in from_main(lambda: [str(folder) for folder in candidates(keys)])]
    stages = open_stages(config, topology)
    _check_corpora([opened.corpus for opened in stages])
    if not folders and starts_from_neox(keys):
        require_writable(stages[0].corpus.config)
        lock.take()
        folders = [Path(from_main(lambda: str(take_over(stages))))]
    chosen, number = first_valid(folders, watchdog.beat), 0
    if chosen.folder is not None:
        meta = native.read_meta(chosen.folder, resumable=True)
        number = stage_at([opened.stage for opened in stages], max(0, meta["step"] - 1))
        refuse_other_run(chosen.folder, stages[number].corpus, stages[number].shared)
        # A validation that was postponed at a border belongs to the stage that ends there.
        finished = meta["step"] >= stages[number].stage.last and not meta["progress"]["unvalidated"]
        number += finished and number + 1 < len(stages)
    require_writable(stages[number].corpus.config)
    lock.take()  # if it was just made
    lock.take_figures(stages[number].corpus.config)
    watchdog.beat("data and checkpoint are checked")
    quarantine_newer(keys, chosen)

    folder = chosen.folder
    start = 0 if folder is None else int(native.read_meta(folder)["step"])
    leave = config.logging.last_step(start, stages[-1].stage.last)
    for opened in stages[number:]:
        step = _train_stage(opened, topology, folder, remotes, preemption, watchdog)
        if step < opened.stage.last or step == leave:
            break
        folder = None if keys.save is None else native.step_folder(Path(keys.save), step)


def _check_corpora(corpora: Sequence[Corpus]) -> None:
    """Check what validation needs, and log what is not known of the data."""
    unverified = dict.fromkeys(name for corpus in corpora for name in corpus.unverified)
    if dist.is_main() and unverified:
        names = ", ".join(unverified)
        logger.warning("no tokenizer saved with %s; cannot verify that it matches this run", names)
    for line in dict.fromkeys(line for corpus in corpora for line in corpus.left_out) if dist.is_main() else ():
        logger.warning(line)
    for note, absent in {validation_note(corpus): corpus.valid is None for corpus in corpora}.items():
        if note is not None:
            logger.log(logging.WARNING if absent else logging.INFO, note)
    for corpus in corpora:
        check_validation(corpus)


def _train_stage(
    opened: OpenedStage,
    topology: Topology,
    folder: Path | None,
    remotes: RemoteCheckpoints,
    preemption: CaughtSignals,
    watchdog: Watchdog,
) -> int:
    """Build the engine, from the checkpoint in `folder` if there is one, and train; returns the step that was reached.

    A stage starts from the checkpoint at its border as a resumed run does, so that both compute the same.
    """
    corpus, sizes = opened.corpus, opened.sizes
    watchdog.beat("building the model")
    engine, origin = _build_engine(corpus, sizes, topology, folder is not None, watchdog)
    watchdog.beat("the model is built")
    checkpoints = Checkpoints(corpus, engine, topology, opened.shared, origin, watchdog, remotes)
    trainer = Trainer(corpus, engine, checkpoints, sizes, topology, preemption, watchdog, opened.stage)
    if folder is not None:
        trainer.restore(folder)
        checkpoints.catch_up(trainer.step)
    _log_summary(opened, trainer.step)
    preemption.save_on_interrupt()  # before, there is nothing to save
    try:
        trainer.run()
    except BaseException:
        checkpoints.leave()
        raise
    if trainer.step == opened.stage.last:
        engine.close()
    return trainer.step


def _build_engine(
    corpus: Corpus, sizes: BatchSizes, topology: Topology, resumed: bool, watchdog: Watchdog
) -> tuple[Engine, str | None]:
    """Build the engine; also returns the identity of the checkpoint whose weights a fresh run starts from, if any."""
    config, keys, device = corpus.config, corpus.config.checkpoint, dist.local_device()
    if resumed:  # the weights come from the checkpoint's state
        model, origin = assemble_model(config, device), None
    else:
        given = find_native(keys.load, keys.iteration) if keys.finetune and keys.load is not None else None
        if given is not None:
            verify_distributed(given, watchdog.beat)
            watchdog.beat("the given weights are verified")
        model, origin = initial_model(config, device, corpus.tokenizer, verify=False)
    train_only_parts(model, config.optimizer)
    saving.seed_everything(config.seed, topology.random_stream(dist.rank()))
    saving.compute_deterministically(config.general.deterministic)
    model.train()
    optimizer = partial(build_optimizer, config=config.optimizer)
    return build_engine(model, optimizer, config, sizes, topology.coordinates(dist.rank()).pipe), origin


def _log_summary(opened: OpenedStage, step: int) -> None:
    """Log the model, the batch, the start, and what the run reads of each source until the end of the stage."""
    stage, corpus, total = opened.stage, opened.corpus, opened.sizes.total
    logger.info(
        "%s: %s, %s, %d process(es), %d x %d tokens a step; %s",
        stage.config.position.pos_emb,
        trainable_share(corpus.config).text(),
        stage.config.precision.dtype,
        dist.world_size(),
        total,
        stage.config.model.seq_length,
        f"resuming at step {step}" if step else "from step 0",
    )
    if dist.is_main() and (note := rounded_sum(stage.config, opened.sizes)) is not None:
        logger.warning(note)
    shares = corpus.mixture(stage.last, total)
    logger.info(mixture_table(shares))
    for line in repeated_sources(shares) if dist.is_main() else ():
        logger.warning(line)


class _PreemptedDuringValidationError(Exception):
    """A signal came during a validation, on this rank or another."""


class Trainer:
    """The training loop of one process; all ranks do the same in the same order.

    Attributes:
        step: completed optimizer steps.
    """

    def __init__(
        self,
        corpus: Corpus,
        engine: Engine,
        checkpoints: Checkpoints,
        sizes: BatchSizes,
        topology: Topology,
        preemption: CaughtSignals,
        watchdog: Watchdog,
        stage: RunStage[Config] | None = None,
    ) -> None:
        """`stage` is what the corpus belongs to, by default the whole run."""
        self._stage = stage or corpus.config.run_stages()[0]
        self._corpus, self._engine, self._checkpoints = corpus, engine, checkpoints
        self._config, self._sizes = corpus.config, sizes
        # Ranks that share a model read the same samples.
        self._layout = (sizes.total, sizes.micro, topology.coordinates(dist.rank()).data, topology.data)
        self._preemption, self._watchdog = preemption, watchdog
        self._guard, self._skipped, self._unvalidated = LossGuard(self._config.faults), 0, False
        self._losses = IntervalMean(self._config.logging.log_interval)
        self.step, self._saved = 0, -1 if is_due(0, self._config.checkpoint) else 0

    def restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`.

        Raises:
            CheckpointError: its run left out data after a rollback of an earlier version, or as `Checkpoints.restore`.
        """
        begins = native.read_meta(folder)["step"] == self._stage.first
        anew = begins_optimizer(self._config.checkpoint, folder)
        meta = self._checkpoints.restore(folder, anew or (begins and self._stage.reset_optimizer))
        progress = meta["progress"]
        if progress.get("skips"):
            raise CheckpointError(
                f"{folder}: an earlier version rolled this run back and left out data, which this one cannot; resume "
                "it with the version that wrote the checkpoint, or start from its weights with finetune=true"
            )
        self.step, self._skipped = int(meta["step"]), int(progress["skipped"])
        self._saved = self.step
        # Losses at another length or on other data are no measure of a spike.
        self._guard.restore(progress["guard"] | ({"losses": [], "norms": []} if begins else {}))
        self._losses.restore(progress.get("losses", ()))
        # The checkpoint was written before its validation, which a later launch may have made up for.
        postponed = bool(progress.get("unvalidated", False))
        folder, run = run_folder(self._config), self._checkpoints.run
        self._unvalidated = postponed and not from_main(lambda: is_validated(folder, self.step, run))

    def run(self) -> None:
        """Train to the last step of the stage or of this launch, and save.

        Raises:
            Stopped: by a signal or by the loss guard, after saving what is valid.
            CheckpointError: a checkpoint could not be written.
        """
        last = self._config.logging.last_step(self.step, self._stage.last)
        tokens = self._sizes.total * self._config.model.seq_length
        if self.step >= last and not self._unvalidated:
            logger.info("nothing to do: step %d is reached already (train_iters is %d)", self.step, last)
        if self.step < last or self._unvalidated:
            monitor = Monitor(
                self._config, self.step, tokens, dist.gather_floats, dist.rank(), self._skipped, self._checkpoints.run
            )
            if self.step == self._stage.first > 0:
                monitor.note(self.step, f"stage begins: {self._stage.text}")
            try:
                if self.step == 0:
                    self._save()  # if extra_save_iters has 0
                with open_loader(self._corpus, self._corpus.train, self._layout) as loader:
                    if self._unvalidated:  # due when the run was stopped
                        self._validate_and_save(monitor)
                    while self.step < last:
                        self._train_step(loader, monitor)
            finally:
                monitor.close()
        self._save()
        try:
            self._checkpoints.wait()
        except ServiceError:
            if not dist.anyone((self._asked_to_stop(),))[0]:
                raise
            self._leave()

    def _train_step(self, loader: Loader, monitor: Monitor) -> None:
        """One optimizer step: read, train, judge, report, and validate and save if due."""
        with monitor.during("waiting"):
            micro_batches = loader.micro_batches(self.step)
        rate = self._stage.learning_rate(self.step)
        result = self._engine.train_step(micro_batches, rate, self._guard.limits())
        verdict = self._guard.observe(result.loss, result.grad_norm)

        self.step, self._skipped = self.step + 1, self._skipped + result.skipped
        self._watchdog.beat(f"step {self.step}")
        loss = self._losses.add(self.step, result.loss if result.labels else None, result.skipped)
        figures = {"loss": loss, "grad_norm": result.grad_norm, "lr": rate}
        if self._engine.loss_scale is not None:
            figures["loss_scale"] = self._engine.loss_scale
        monitor.stepped(self.step, figures, result.skipped)
        if verdict.reason is not None:
            monitor.note(self.step, f"{verdict.reason}: {verdict.kind}")
        if not result.labels:
            monitor.note(self.step, "no token of this step counts in the loss (labels and loss masks): no gradient")

        if verdict.kind == "stop":
            self._checkpoints.wait()
            raise Diverged(f"stopped at step {self.step}: {verdict.reason}; {self._newest()}{self._earlier()}")
        self._unvalidated = self._finished() or self.step % self._config.logging.eval_interval == 0
        self._validate_and_save(monitor)

    def _validate_and_save(self, monitor: Monitor) -> None:
        """Validate and save if due; after a signal, save and leave."""
        preempted, failed = dist.anyone((self._asked_to_stop(), self._checkpoints.failed))
        if failed:
            self._checkpoints.wait(hurry=True)  # raises its error

        if self._unvalidated and not preempted:
            try:
                with monitor.during("validating"):
                    figures = validate(self._corpus, self._mean_loss, self._layout)
            except _PreemptedDuringValidationError:
                preempted = True  # the resumed run validates first
            else:
                self._unvalidated = False
                if self._finished():
                    figures |= mixture_figures(self._corpus.mixture(self.step, self._sizes.total))
                if figures:  # together, so that a kill leaves all of them or none
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
        """End the run after a signal to any rank. Uploads that fail are left to the next start.

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
        """How to go on from a checkpoint before the bad steps, as the end of a message; empty without checkpoints."""
        save = self._config.checkpoint.save
        if save is None or not native.steps(Path(save)):
            return ""
        return (
            f". To go on from an earlier step, set load={save} iteration=STEP without auto_resume, and for example a "
            "lower optimizer.params.lr; later checkpoints are then moved to quarantine/"
        )

    def _newest(self) -> str:
        save = self._config.checkpoint.save
        steps = native.steps(Path(save)) if save is not None else []
        return f"step {steps[-1]} is saved" if steps else "nothing is saved"
