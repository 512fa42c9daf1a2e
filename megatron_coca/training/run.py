"""A training run in one process: start the run, and train its stages one after the other."""

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_coca.attention.backends.sdpa import cuda_kernel
from megatron_coca.checkpoints import native
from megatron_coca.checkpoints.load import find_native
from megatron_coca.config import Config, stage_at
from megatron_coca.data.mixture import mixture_table, repeated_sources
from megatron_coca.model import assemble_model, choose_backends
from megatron_coca.support.console import set_up_logging
from megatron_coca.support.errors import InputError
from megatron_coca.support.host import keep_freed_memory
from megatron_coca.training import launch
from megatron_coca.training.adapters import add_adapters, require_peft
from megatron_coca.training.checkpointing.initial_model import InitialModel, initial_model, model_to_adapt
from megatron_coca.training.checkpointing.neox_resume import convert_from_neox, starts_from_neox
from megatron_coca.training.checkpointing.remote_checkpoints import use_local_folders
from megatron_coca.training.checkpointing.resume import (
    StageStart,
    candidates,
    check_same_run,
    continuation,
    first_valid,
    quarantine_newer,
    verify_distributed,
)
from megatron_coca.training.checkpointing.saving import DTYPES, Checkpoints
from megatron_coca.training.collectives import FolderLock, from_main, require_writable
from megatron_coca.training.corpus import Corpus, validation_note, with_train_iters
from megatron_coca.training.engine import Engine, build_engine
from megatron_coca.training.engine import group as dist
from megatron_coca.training.engine.state import ADDED_AT
from megatron_coca.training.launches import LaunchRecord
from megatron_coca.training.monitoring.watchdog import Watchdog
from megatron_coca.training.opened_stages import OpenedStage, open_stages
from megatron_coca.training.optimizer import train_only_parts, trainable_share
from megatron_coca.training.randomness import compute_deterministically, seed_everything
from megatron_coca.training.run_context import RunContext
from megatron_coca.training.sinks import run_folder
from megatron_coca.training.starting_rate import with_starting_rate
from megatron_coca.training.topology import Topology, rounded_sum
from megatron_coca.training.trainer import Trainer
from megatron_coca.training.validation import check_validation
from megatron_coca.work.signals import CaughtSignals
from megatron_coca.work.statuses import Stopped

logger = logging.getLogger(__name__)


def fit(config: Config, without_effect: Sequence[str] = ()) -> None:
    """Train in the process group that the environment describes, from step 0 or from a checkpoint.

    `without_effect` contains the configured GPT-NeoX keys that have no effect; they are logged.

    Raises:
        ConfigError, DataError, CheckpointError, BackendError: an input is invalid; nothing was overwritten.
        Stopped: the run ended in an orderly way before its last step; the error's `status` is the exit status.
    """
    launch.complete_environment(os.environ)
    launch.check_devices(config, os.environ)
    if not torch.cuda.is_available():
        keep_freed_memory()
        torch.set_num_threads(min(torch.get_num_threads(), launch.threads_per_process(os.environ)))
    # Until there is something to save, a signal ends the process as usual, because other ranks may never join.
    peers = dist.init_distributed(config.faults.collective_timeout, config.launch.join_timeout, watch=True)
    orderly = False
    try:
        set_up_logging(dist.is_main())
        config, rate = with_starting_rate(config)
        _log_devices(config, without_effect)
        if rate is not None:
            logger.info(rate)
        config, remotes = use_local_folders(config)
        lock = FolderLock(config.checkpoint.save)
        config = lock.choose_log_dir(config)
        watchdog = Watchdog(config.faults.watchdog_timeout, run_folder(config), dist.rank())
        answer = "stopping after this step, with a checkpoint if `save` is set; a second Ctrl-C ends the run at once"
        record = LaunchRecord(run_folder(config), dist.is_main())
        with CaughtSignals(answer=answer if dist.is_main() else None, last=True) as preemption, watchdog, lock, record:
            remotes.attend(watchdog.beat, lambda: preemption.requested is not None)
            topology = Topology.of(config.parallel, dist.world_size())
            _train_stages(config, lock, RunContext(topology, remotes, preemption, watchdog, lock), record)
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


def _log_devices(config: Config, without_effect: Sequence[str]) -> None:
    """Log the run's devices and attention backends, and warnings about its configuration."""
    chosen = [choose_backends(stage.config, dist.local_device()) for stage in config.run_stages()]
    backends = ", ".join(dict.fromkeys(name for names in chosen for name in names.values()))
    logger.info(launch.describe_devices(config, dist.world_size(), backends))
    if torch.cuda.is_available() and "sdpa" in backends:
        model, dtype = config.model, DTYPES[config.precision.dtype]
        shape = (model.num_attention_heads, model.num_kv_heads, model.seq_length, model.head_dim)
        logger.info("attention kernel of sdpa: %s", cuda_kernel(*shape, dtype, trains=True))
    if (note := launch.unused_gpus(config, dist.world_size())) is not None:
        logger.warning(note)
    if without_effect:
        logger.info("keys without effect (docs/config.md): %s", ", ".join(without_effect))
    for note in filter(None, (config.model.narrow_mlp, launch.unaligned_mlp(config))):
        logger.warning(note)


def _train_stages(config: Config, lock: FolderLock, context: RunContext, record: LaunchRecord) -> None:
    """Train the remaining stages of the run, each from the checkpoint of the previous stage."""
    stages, folder = _open_run(config, lock, context)
    start = 0 if folder is None else int(native.read_meta(folder)["step"])
    last = config.logging.last_step(start, stages[-1].stage.last)
    nodes = dist.gather_texts(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    if start < last:  # otherwise there is nothing to do, and no file is changed
        record.start(start, stages[-1].stage.last, nodes, config.checkpoint.save)
    for opened in stages:
        step = _train_stage(opened, folder, context)
        if step < opened.stage.last or step == last:
            break
        folder = None if config.checkpoint.save is None else native.step_folder(Path(config.checkpoint.save), step)


def _open_run(config: Config, lock: FolderLock, context: RunContext) -> tuple[list[OpenedStage], Path | None]:
    """Open the data and choose the checkpoint to resume from. Return the remaining stages and that checkpoint."""
    keys, data_ranks = config.checkpoint, context.topology.data
    if any(stage.config.optimizer.lora is not None for stage in config.run_stages()):
        require_peft()
    if config.schedule.train_epochs is not None:
        config = with_train_iters(config, config.batch.resolve(data_ranks))
    for stage in config.run_stages():
        stage.config.batch.resolve(data_ranks)
    lock.take()  # if the folder exists, no other run may change it after it is read
    context.remotes.prepare()
    folders = [Path(text) for text in from_main(lambda: [str(folder) for folder in candidates(keys)])]
    stages = open_stages(config, context.topology)
    _check_corpora([opened.corpus for opened in stages])
    if not folders and starts_from_neox(keys):
        require_writable(stages[0].corpus.config)
        lock.take()
        folders = [Path(from_main(lambda: str(convert_from_neox(stages))))]
    chosen, number = first_valid(folders, context.watchdog.beat), 0
    if chosen.folder is not None:
        meta = native.read_meta(chosen.folder, resumable=True)
        number = stage_at([opened.stage for opened in stages], max(0, meta["step"] - 1))
        check_same_run(chosen.folder, stages[number].corpus, stages[number].shared)
        # A postponed validation at the end of a stage still belongs to that stage.
        finished = meta["step"] >= stages[number].stage.last and not meta["progress"]["unvalidated"]
        number += finished and number + 1 < len(stages)
    require_writable(stages[number].corpus.config)
    lock.take()  # if the folder was just created
    lock.take_metric_folders(stages[number].corpus.config)
    context.watchdog.beat("data and checkpoint are checked")
    quarantine_newer(keys, chosen)
    return stages[number:], chosen.folder


def _check_corpora(corpora: Sequence[Corpus]) -> None:
    """Check the data for validation, and log properties of the data that could not be verified."""
    unverified = dict.fromkeys(name for corpus in corpora for name in corpus.unverified)
    if dist.is_main() and unverified:
        names = ", ".join(unverified)
        logger.warning("no tokenizer is saved with %s; cannot verify that it matches this run", names)
    for line in dict.fromkeys(line for corpus in corpora for line in corpus.left_out) if dist.is_main() else ():
        logger.warning(line)
    for note, absent in {validation_note(corpus): corpus.valid is None for corpus in corpora}.items():
        if note is not None:
            logger.log(logging.WARNING if absent else logging.INFO, note)
    for corpus in corpora:
        check_validation(corpus)


def _train_stage(opened: OpenedStage, folder: Path | None, context: RunContext) -> int:
    """Build the engine and train one stage, starting from the checkpoint in `folder` if set. Return the last step.

    A later stage starts from the checkpoint of the previous stage, exactly as a resumed run does, so that both compute
    the same results.
    """
    context.watchdog.beat("building the model")
    how = None if folder is None else continuation(folder, opened.stage)
    engine, origin, adapts = _build_engine(opened, how, context)
    context.watchdog.beat("the model is built")
    checkpoints = Checkpoints(opened, engine, context, origin, adapts)
    trainer = Trainer(opened, engine, checkpoints, context)
    if how is not None:
        trainer.restore(how)
        checkpoints.catch_up(trainer.step)
    _log_summary(opened, trainer.step)
    context.preemption.save_on_interrupt()  # before this, there is nothing to save
    try:
        trainer.run()
    except BaseException:
        checkpoints.leave()
        raise
    if trainer.step == opened.stage.last:
        engine.close()
    return trainer.step


class _Built(NamedTuple):
    """An engine, the identity of the checkpoint from which a new run gets its weights (None if there is no such
    checkpoint), and the model that the adapters change (None without adapters).
    """

    engine: Engine
    origin: str | None
    adapts: native.AdaptedModel | None


def _build_engine(opened: OpenedStage, how: StageStart | None, context: RunContext) -> _Built:
    """Build the engine. `how` is None in a new run; otherwise, it says how the stage continues."""
    config, pipe = opened.corpus.config, context.topology.coordinates(dist.rank()).pipe
    model, origin, adapts = _initial_weights(opened, how, context)
    if config.optimizer.lora is not None:
        add_adapters(model, config.optimizer.lora, config.seed)
    else:
        train_only_parts(model, config.optimizer)
    seed_everything(config.seed, context.topology.random_stream(dist.rank()))
    compute_deterministically(config.general.deterministic)
    model.train()
    separate = how is not None and ADDED_AT in how.counters
    return _Built(build_engine(model, config, opened.sizes, pipe, separate_norms=separate), origin, adapts)


def _initial_weights(opened: OpenedStage, how: StageStart | None, context: RunContext) -> InitialModel:
    """Build the model of a stage. In a resumed run, weights that are restored later are random at first."""
    config, keys, device = opened.corpus.config, opened.corpus.config.checkpoint, dist.local_device()

    def verify(folder: Path) -> None:
        verify_distributed(folder, context.watchdog.beat)
        context.watchdog.beat("the given weights are verified")

    if how is not None:
        if config.optimizer.lora is not None:
            return model_to_adapt(config, device, how.folder, verify)
        return InitialModel(assemble_model(config, device), None)
    given = find_native(keys.load, keys.iteration) if keys.finetune and keys.load is not None else None
    if given is not None:
        verify(given)
    return initial_model(config, device, opened.corpus.tokenizer, verify=False)


def _log_summary(opened: OpenedStage, step: int) -> None:
    """Log the model, the batch, the first step, and the tokens that the stage reads from each source."""
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
