"""Validation during training: losses on held-out data, and perplexities at different window lengths."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.attention.positions.forms import check_range
from megatron_coca.config import Config, ConfigError
from megatron_coca.config.data import window_tokens
from megatron_coca.data import Batch, Blend, DataError, Samples
from megatron_coca.data.mixture import source_names
from megatron_coca.training.checkpointing.saving import DTYPES
from megatron_coca.training.corpus import Corpus, CorpusLayout, open_loader
from megatron_coca.training.engine import HeldOutLoss, label_weights
from megatron_coca.training.engine import group as dist

logger = logging.getLogger(__name__)

VALIDATION_LOSS = "validation_loss"
VALIDATION_PERPLEXITY = "validation_perplexity"
MeanLoss = Callable[[Sequence[Batch]], HeldOutLoss]
"""A function of this rank's micro-batches. It returns the mean loss and the number of labels over all ranks."""


def check_validation(corpus: Corpus) -> None:
    """Check that the data and the position method support `eval_windows`.

    Raises:
        ConfigError, DataError: the data or the position method does not support `eval_windows`.
    """
    config, windows = corpus.config, _windows(corpus.config)
    longest = max(windows.values(), default=0)
    for shard in corpus.valid.shards if corpus.valid is not None else ():
        if windows and shard.len_tokens <= longest:
            raise DataError(
                f"{shard.prefix}: has {shard.len_tokens} validation tokens, but eval_windows needs more than "
                f"{longest}; hold out more documents, or leave out the longest window"
            )
    if windows and config.position.pos_emb == "xpos":
        try:
            check_range(longest / 2, DTYPES[config.precision.dtype])
        except PositionRangeError as error:
            raise ConfigError(f"eval_windows: {error}") from error


def validate(corpus: Corpus, mean_loss: MeanLoss, layout: CorpusLayout) -> dict[str, float]:
    """Return mean losses, in nats per token, on the first batches of the validation data, which are always the same. A
    loss is the mean over all labels of its batches. A loss without labels is omitted, with a warning.

    `validation_loss` is the loss on `eval_iters` batches of the blend. With several sources and `eval_per_source`,
    `validation_loss/NAME` is the loss on each source. A source's number of batches is proportional to its weight in the
    blend, but at least one, so that all sources together take about as long as the blend. With `eval_windows`, the
    result includes `window_perplexities`. The result is empty if there is no validation data. Every rank must call
    this.
    """
    valid, keys = corpus.valid, corpus.config.logging
    if valid is None or keys.eval_iters == 0:
        return {}
    blends = {VALIDATION_LOSS: (valid, keys.eval_iters)}
    packing = corpus.config.data.pack_impl, corpus.config.data.allow_chopped
    if keys.eval_per_source and len(valid.shards) > 1:
        names, total = source_names([str(shard.prefix) for shard in valid.shards]), math.fsum(valid.weights)
        for name, shard, weight in zip(names, valid.shards, valid.weights, strict=True):
            batches = max(1, round(weight / total * keys.eval_iters))
            blends[f"{VALIDATION_LOSS}/{name}"] = Blend([shard], [1.0], valid.seq_length, valid.seed, *packing), batches
    losses = {}
    for name, (blend, batches) in blends.items():
        with open_loader(corpus, blend, layout) as loader:
            measured = [mean_loss(loader.micro_batches(index)) for index in range(batches)]
        if terms := _terms(name, measured):
            losses[name] = sum(terms) / batches
    return losses | window_perplexities(corpus, valid, mean_loss, layout)


def window_perplexities(corpus: Corpus, valid: Samples, mean_loss: MeanLoss, layout: CorpusLayout) -> dict[str, float]:
    """Return `validation_perplexity_W` for every window W of `eval_windows`.

    Every sample has the length of the longest window. For each window, the last S tokens of a sample are scored, where
    S is half of the shortest window. A window of W tokens reads the last W tokens, so every scored token has a context
    of W-S+1 to W tokens, as in a sliding window with stride S. Like training samples, windows may cross document
    boundaries. The longest window reads about as many tokens as the validation loss.
    """
    keys, length, windows = corpus.config.logging, valid.seq_length, _windows(corpus.config)
    if not windows:
        return {}
    longest, scored = max(windows.values()), max(1, min(windows.values()) // 2)
    samples = Blend(valid.shards, valid.weights, longest, valid.seed)
    total, micro, rank, ranks = layout
    rows = max(1, micro * length // longest)
    batches = max(1, keys.eval_iters * total * length // (longest * rows * ranks))
    figures = {}
    for name, window in windows.items():
        with open_loader(corpus, samples, (rows * ranks, rows, rank, ranks), window) as loader:
            measured = [mean_loss([_last_scored(loader.micro_batches(index)[0], scored)]) for index in range(batches)]
        if terms := _terms(figure := f"{VALIDATION_PERPLEXITY}_{name}", measured):
            mean = math.fsum(terms) / batches
            figures[figure] = math.inf if mean > 700 else math.exp(mean)
    return figures


def _terms(name: str, measured: Sequence[HeldOutLoss]) -> list[float]:
    """Return the mean losses of batches, weighted so that their average is the mean over all labels. The list is empty
    if there are no labels.
    """
    counts = [each.labels for each in measured]
    if not any(counts):
        if dist.is_main():
            logger.warning("%s: not reported, because no token of its validation samples counts in the loss", name)
        return []
    weights = label_weights(counts, sum(counts), len(counts))
    return [each.mean * weight for each, weight in zip(measured, weights, strict=True)]


def _windows(config: Config) -> dict[str, int]:
    """Return the number of tokens of each window W in `eval_windows`, by the W of `validation_perplexity_W`."""
    given, length = config.logging.eval_windows or (), config.model.seq_length
    return {str(window): tokens for window in given if (tokens := window_tokens(window, length)) is not None}


def _last_scored(batch: Batch, count: int) -> Batch:
    """Return the batch with a loss mask that selects only its last `count` inputs."""
    mask = np.zeros((len(batch.tokens), batch.tokens.shape[1] - 1), dtype=bool)
    mask[:, -count:] = True
    return replace(batch, loss_mask=mask if batch.loss_mask is None else mask & batch.loss_mask)
