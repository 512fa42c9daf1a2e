"""The training loop."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from megatron_coca.config import BatchSizes, Config, ConfigError
from megatron_coca.data import Blend, Loader
from megatron_coca.model import LanguageModelLoss, build_model, keep_freed_memory
from megatron_coca.training import engine as dist
from megatron_coca.training import launch, rng
from megatron_coca.training.checkpoint import (
    Checkpoints,
    exclusive,
    is_due,
    load_initial_weights,
    refuse_other_run,
    require_writable,
    starting_point,
    verify,
)
from megatron_coca.training.corpus import Corpus, open_corpus
from megatron_coca.training.engine import Engine
from megatron_coca.training.mixture import mixture_figures, mixture_table, repeated_sources
from megatron_coca.training.optimizer import build_optimizer
from megatron_coca.training.reporting import Reporters, set_up_logging
from megatron_coca.training.schedule import learning_rate

logger = logging.getLogger(__name__)


def fit(config: Config) -> None:
    """Train as the configuration says, from its start or from where its checkpoint ends, in the process group of the
    environment.

    Raises:
        ConfigError, DataError, CheckpointError, BackendError: something given cannot be used; nothing was overwritten.
    """
    launch.complete_environment(os.environ)
    if not torch.cuda.is_available():
        keep_freed_memory()
        torch.set_num_threads(min(torch.get_num_threads(), launch.threads_per_process(os.environ)))
    dist.init_distributed()
    set_up_logging(dist.is_main())
    try:
        _run(config)
    finally:
        dist.shut_down()


def _run(config: Config) -> None:
    if config.schedule.train_iters is None:
        raise ConfigError(["train_iters: not set; training needs it, for example `train_iters=1000`"])
    if config.optimizer.lr is None:
        raise ConfigError(["optimizer.params.lr: not set; training needs it, for example `optimizer.params.lr=1e-4`"])
    if config.precision.dtype == "fp16" and not torch.cuda.is_available():
        raise ConfigError(["precision: fp16 needs a GPU; use precision=bfloat16 or precision=fp32 here"])
    sizes = config.batch.resolve(dist.world_size())
    folder = starting_point(config.checkpoint)
    corpus = open_corpus(config)
    if corpus.unverified and dist.is_main():
        logger.warning(
            "no tokenizer lies beside %s: nothing shows that they were made with that of this run",
            ", ".join(corpus.unverified),
        )
    layout = _layout(corpus.config, sizes)
    if folder is not None:
        verify(folder)
        refuse_other_run(folder, corpus, layout)
    require_writable(corpus.config)
    with exclusive(corpus.config.checkpoint.save):
        _train(corpus, sizes, layout, folder)


def _train(corpus: Corpus, sizes: BatchSizes, layout: dict[str, Any], folder: Path | None) -> None:
    engine = _build_engine(corpus.config, sizes)
    checkpoints = Checkpoints(corpus, engine, layout)
    start = checkpoints.restore(folder) if folder is not None else 0
    logger.info(_summary(corpus.config, engine, sizes, start))
    _log_mixture(corpus, sizes)
    reporters = Reporters(corpus.config, start, dist.is_main())
    try:
        _iterate(corpus, engine, checkpoints, reporters, sizes, start)
    finally:
        reporters.close()


def _build_engine(config: Config, sizes: BatchSizes) -> Engine:
    model = build_model(config, dist.local_device())
    load_initial_weights(model, config.checkpoint)
    rng.seed_everything(config.seed, dist.rank())
    model.train()
    return Engine(LanguageModelLoss(model), build_optimizer(model, config.optimizer), config, sizes)


def _iterate(
    corpus: Corpus, engine: Engine, checkpoints: Checkpoints, reporters: Reporters, sizes: BatchSizes, start: int
) -> None:
    config, layout = corpus.config, (sizes.total, sizes.micro, dist.rank(), dist.world_size())
    assert config.schedule.train_iters is not None and config.optimizer.lr is not None
    last = min(config.schedule.train_iters, config.logging.exit_interval or config.schedule.train_iters)
    clock, seen = time.perf_counter(), start
    saved = start
    if start >= last:
        logger.info("nothing to do: step %d is reached already (train_iters or exit_interval is %d)", start, last)
    with open_loader(corpus, corpus.train, layout) as loader:
        for step in range(start, last):
            rate = learning_rate(step, config.optimizer.lr, config.schedule)
            result = engine.train_step(loader.micro_batches(step), rate)
            done = step + 1
            if done % config.logging.log_interval == 0 or done == last:
                elapsed = time.perf_counter() - clock
                tokens = (done - seen) * sizes.total * config.model.seq_length
                reporters.report(
                    done, loss=result.loss, grad_norm=result.grad_norm, lr=rate, tokens_per_second=tokens / elapsed
                )
                clock, seen = time.perf_counter(), done
            reporters.advance()
            if done == config.schedule.train_iters:
                reporters.report(done, **mixture_figures(corpus.train.mixture(done * sizes.total)))
            if done % config.logging.eval_interval == 0 or done == config.schedule.train_iters:
                _validate(corpus, engine, reporters, layout, done)
            if is_due(done, config.checkpoint):
                checkpoints.save(done)
                saved = done
    if saved < last:
        checkpoints.save(last)


def open_loader(corpus: Corpus, blend: Blend, layout: tuple[int, int, int, int]) -> Loader:
    """A loader of one of the corpus's blends; `layout` is global batch, micro batch, rank, world size.

    Ids in the embedding's padding are refused too: no tokenizer of the configured vocabulary gives them.
    """
    config = corpus.config
    return Loader(
        blend,
        *layout,
        vocab_size=config.model.vocab_size,
        packing=corpus.packing,
        num_workers=config.data.num_workers,
    )


def _validate(
    corpus: Corpus, engine: Engine, reporters: Reporters, layout: tuple[int, int, int, int], step: int
) -> None:
    """Report the mean loss of the first `eval_iters` validation batches: the same samples every time."""
    batches = corpus.config.logging.eval_iters
    if corpus.valid is None or batches == 0:
        return
    with open_loader(corpus, corpus.valid, layout) as loader:
        losses = [engine.mean_loss(loader.micro_batches(index)) for index in range(batches)]
    reporters.report(step, validation_loss=sum(losses) / len(losses))


def _layout(config: Config, sizes: BatchSizes) -> dict[str, Any]:
    return {
        "world_size": dist.world_size(),
        "zero_stage": config.parallel.stage,
        "batch": sizes.total,
        "dtype": config.precision.dtype,
    }


def _log_mixture(corpus: Corpus, sizes: BatchSizes) -> None:
    """Tell what the whole run, from step 0 on, takes from each source."""
    assert corpus.config.schedule.train_iters is not None
    shares = corpus.train.mixture(corpus.config.schedule.train_iters * sizes.total)
    logger.info(mixture_table(shares))
    for line in repeated_sources(shares) if dist.is_main() else ():
        logger.warning(line)


def _summary(config: Config, engine: Engine, sizes: BatchSizes, start: int) -> str:
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    return (
        f"{config.position.pos_emb}: {parameters:,} parameters, {config.precision.dtype}, {dist.world_size()} process(es), "
        f"{sizes.total} x {config.model.seq_length} tokens a step; "
        + (f"resuming at step {start}" if start else "from step 0")
    )
