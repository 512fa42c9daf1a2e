"""A training run from its configuration to its end."""

import logging
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_coca.checkpoints.load import find_native
from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.model import assemble_model, keep_freed_memory
from megatron_coca.training import engine as dist
from megatron_coca.training import launch, saving
from megatron_coca.training.collectives import FolderLocks, from_main, require_writable
from megatron_coca.training.corpus import Corpus, mixture_table, open_corpus, repeated_sources, validation_note
from megatron_coca.training.engine import Engine
from megatron_coca.training.exit_status import Preemption
from megatron_coca.training.health import check_health
from megatron_coca.training.optimizer import build_optimizer, train_only_parts, trainable_share
from megatron_coca.training.remote_checkpoints import RemoteCheckpoints, use_local_folders
from megatron_coca.training.reporting import run_folder, set_up_logging
from megatron_coca.training.resume import (
    candidates,
    first_valid,
    initial_model,
    quarantine_newer,
    refuse_other_run,
    verify_distributed,
)
from megatron_coca.training.saving import Checkpoints
from megatron_coca.training.topology import Topology
from megatron_coca.training.trainer import Shape, Trainer
from megatron_coca.training.watchdog import Watchdog

logger = logging.getLogger(__name__)


def fit(config: Config) -> None:
    """Train as the configuration says, from its start or from where its checkpoint ends, in the process group of the
    environment.

    Raises:
        ConfigError, DataError, CheckpointError, BackendError: something given cannot be used; nothing was overwritten.
        Stopped: the run ended before its last step, in good order; its `status` says why.
    """
    launch.complete_environment(os.environ)
    if not torch.cuda.is_available():
        keep_freed_memory()
        torch.set_num_threads(min(torch.get_num_threads(), launch.threads_per_process(os.environ)))
    # Before there is anything to save, signals end the process as they always do: others may never come.
    dist.init_distributed(config.faults.collective_timeout, config.launch.join_timeout)
    set_up_logging(dist.is_main())
    config, remotes = use_local_folders(config)
    watchdog = Watchdog(config.faults.watchdog_timeout, run_folder(config), dist.rank())
    try:
        with Preemption() as preemption, watchdog:
            _run(config, remotes, preemption, watchdog)
    except Exception as error:
        error.add_note(f"on rank {dist.rank()} of {dist.world_size()}, {socket.gethostname()}")
        raise
    finally:
        dist.shut_down()


def _run(config: Config, remotes: RemoteCheckpoints, preemption: Preemption, watchdog: Watchdog) -> None:
    _refuse_what_cannot_train(config)
    topology = Topology.of(config.parallel, dist.world_size())
    shape = Shape(config.batch.resolve(topology.data), topology)
    keys = config.checkpoint
    remotes.make_local_folder()
    with FolderLocks(keys.save, keys.save_copy) as locks:
        locks.take()
        remotes.prepare()
        _start(config, shape, locks, remotes, (preemption, watchdog))


def _start(
    config: Config,
    shape: Shape,
    locks: FolderLocks,
    remotes: RemoteCheckpoints,
    watchers: tuple[Preemption, Watchdog],
) -> None:
    """Choose what to resume from, and train. Folders that are there are locked, so that no other run changes them
    between the two.
    """
    _, watchdog = watchers
    keys = config.checkpoint
    folders = [Path(text) for text in from_main(lambda: [str(folder) for folder in candidates(keys)])]
    corpus = open_corpus(config)
    if corpus.unverified and dist.is_main():
        logger.warning(
            "no tokenizer lies beside %s: nothing shows that they were made with that of this run",
            ", ".join(corpus.unverified),
        )
    if (note := validation_note(corpus)) is not None and dist.is_main():
        logger.log(logging.WARNING if corpus.valid is None else logging.INFO, note)
    layout = {"batch": shape.sizes.total, "dtype": config.precision.dtype}
    chosen = first_valid(folders, watchdog.beat)
    if chosen.folder is not None:
        refuse_other_run(chosen.folder, corpus, layout)
    require_writable(corpus.config)
    locks.take()
    watchdog.beat("data and checkpoint are checked")
    quarantine_newer(keys, chosen)
    _train(corpus, shape, layout, chosen.folder, remotes, watchers)


def _refuse_what_cannot_train(config: Config) -> None:
    if config.schedule.train_iters is None:
        raise ConfigError(["train_iters: not set; training needs it, for example `train_iters=1000`"])
    if config.optimizer.lr is None:
        raise ConfigError(["optimizer.params.lr: not set; training needs it, for example `optimizer.params.lr=1e-4`"])
    if config.precision.dtype == "fp16" and not torch.cuda.is_available():
        raise ConfigError(["precision: fp16 needs a GPU; use precision=bfloat16 or precision=fp32 here"])


def _train(
    corpus: Corpus,
    shape: Shape,
    layout: dict[str, Any],
    resumed: Path | None,
    remotes: RemoteCheckpoints,
    watchers: tuple[Preemption, Watchdog],
) -> None:
    preemption, watchdog = watchers
    watchdog.beat("building the model")
    if resumed is None:
        _verify_given(corpus.config, watchdog)
    engine, origin = _build_engine(corpus, shape, resumed is None)
    watchdog.beat("the model is built")
    checkpoints = Checkpoints(corpus, engine, shape.topology, layout, origin, watchdog, remotes)
    trainer = Trainer(corpus, engine, checkpoints, shape, preemption, watchdog)
    if resumed is not None:
        trainer.restore(resumed)
    logger.info(_summary(corpus.config, shape, trainer.step))
    _log_mixture(corpus, shape.sizes)
    if corpus.config.faults.health_check:
        watchdog.beat("measuring disk, clocks and network")
        trainer.report_at_start(check_health(corpus.config, trainer.step))
        watchdog.beat("disk, clocks and network are measured")
    try:
        trainer.run()
    except BaseException:
        checkpoints.leave()
        raise


def _verify_given(config: Config, watchdog: Watchdog) -> None:
    """Verify the checkpoint of ours whose weights a new run starts from, if there is one."""
    keys = config.checkpoint
    folder = find_native(keys.load, keys.iteration) if keys.finetune and keys.load is not None else None
    if folder is not None:
        verify_distributed(folder, watchdog.beat)
        watchdog.beat("the given weights are verified")


def _build_engine(corpus: Corpus, shape: Shape, fresh: bool) -> tuple[Engine, str | None]:
    """The engine, and what its weights are of (see `Begun`). A resumed run's weights come from its state."""
    config, device = corpus.config, dist.local_device()
    if fresh:
        model, origin = initial_model(config, device, corpus.tokenizer, verify=False)
    else:
        model, origin = assemble_model(config, device), None
    train_only_parts(model, config.optimizer)
    saving.seed_everything(config.seed, shape.topology.random_stream(dist.rank()))
    model.train()
    place = shape.topology.coordinates(dist.rank())
    optimizer = partial(build_optimizer, config=config.optimizer)
    return dist.build_engine(model, optimizer, config, shape.sizes, place.pipe), origin


def _log_mixture(corpus: Corpus, sizes: BatchSizes) -> None:
    """Tell what the whole run, from step 0 on, takes from each source."""
    assert corpus.config.schedule.train_iters is not None
    shares = corpus.train.mixture(corpus.config.schedule.train_iters * sizes.total)
    logger.info(mixture_table(shares))
    for line in repeated_sources(shares) if dist.is_main() else ():
        logger.warning(line)


def _summary(config: Config, shape: Shape, start: int) -> str:
    parameters, processes = trainable_share(config).text(), dist.world_size()
    begins = f"resuming at step {start}" if start else "from step 0"
    return (
        f"{config.position.pos_emb}: {parameters}, {config.precision.dtype}, {processes} process(es), "
        f"{shape.sizes.total} x {config.model.seq_length} tokens a step; {begins}"
    )
