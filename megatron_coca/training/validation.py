"""The loss of held-out samples: of the blend, and of every source by itself."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_coca.data import Batch, Blend, Loader
from megatron_coca.training.corpus import Corpus
from megatron_coca.training.mixture import source_names

Layout = tuple[int, int, int, int]
"""Global batch, micro batch, rank, world size."""
OpenLoader = Callable[[Corpus, Blend, Layout], Loader]

VALIDATION_LOSS = "validation_loss"


class Evaluator(Protocol):
    """What computes losses: the training engine."""

    def mean_loss(self, micro_batches: Sequence[Batch], /) -> float:
        """In nats per token, over all ranks; every rank must call it."""
        ...


def validate(corpus: Corpus, engine: Evaluator, layout: Layout, open_loader: OpenLoader) -> dict[str, float]:
    """Mean losses in nats per token of the first batches of the validation data: the same samples every time.

    `validation_loss` is that of `eval_iters` batches of the blend. Where there are several sources and
    `eval_per_source` is set, `validation_loss/NAME` is that of each by itself, over the batches that its weight in
    the blend gives it, at least one: all sources together cost about as much as the blend. Empty where nothing is to
    be validated. Every rank must call it.
    """
    keys = corpus.config.logging
    if corpus.valid is None or keys.eval_iters == 0:
        return {}
    losses = {VALIDATION_LOSS: _mean_loss(corpus, corpus.valid, engine, layout, open_loader, keys.eval_iters)}
    for name, (blend, batches) in _sources(corpus.valid, keys.eval_iters).items() if keys.eval_per_source else ():
        losses[f"{VALIDATION_LOSS}/{name}"] = _mean_loss(corpus, blend, engine, layout, open_loader, batches)
    return losses


def _mean_loss(
    corpus: Corpus, blend: Blend, engine: Evaluator, layout: Layout, open_loader: OpenLoader, batches: int
) -> float:
    with open_loader(corpus, blend, layout) as loader:
        losses = [engine.mean_loss(loader.micro_batches(index)) for index in range(batches)]
    return sum(losses) / len(losses)


def _sources(blend: Blend, batches: int) -> dict[str, tuple[Blend, int]]:
    """Every source as a blend of its own, by name, with its share of `batches`; empty for a single source."""
    if len(blend.shards) == 1:
        return {}
    shares = [weight / math.fsum(blend.weights) for weight in blend.weights]
    names = source_names([str(shard.prefix) for shard in blend.shards])
    return {
        name: (Blend([shard], [1.0], blend.seq_length, blend.seed), max(1, round(share * batches)))
        for name, shard, share in zip(names, blend.shards, shares, strict=True)
    }
