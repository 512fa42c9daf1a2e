"""Weights of micro-batches by their labels, so that a loss is the mean over all tokens that count in it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_coca.data import Batch
from megatron_coca.training.engine import group as dist


class HeldOutLoss(NamedTuple):
    """The mean loss of the labels of some samples, in nats per token, and their number, both over all ranks."""

    mean: float
    labels: int


class StepLabels(NamedTuple):
    """The number of labels of a step over all ranks, and a weight for the mean loss of each of this rank's
    micro-batches.
    """

    labels: int
    weights: list[float]


def label_weights(counts: Sequence[int], total: int, parts: int) -> list[float]:
    """Return weights that turn the plain average of `parts` means into the mean over all `total` labels.

    `counts` are the labels of some of the parts. A weight is exactly 1 if its part has the average number, and 0 if
    there are no labels at all.
    """
    return [count * parts / total if total else 0.0 for count in counts]


def step_labels(micro_batches: Sequence[Batch], data_ranks: int) -> StepLabels:
    """Count the labels of a step. Each of `data_ranks` ranks has as many micro-batches as this rank.

    Every rank must call it. The ranks communicate only if there are loss masks, on the host.
    """
    parts = len(micro_batches) * data_ranks
    masks = [batch.loss_mask for batch in micro_batches if batch.loss_mask is not None]
    if not masks:  # then no rank has one
        return StepLabels(parts * micro_batches[0].tokens[:, 1:].size, [1.0] * len(micro_batches))
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    # Ranks that share a model have the same samples.
    total = dist.sum_on_host(sum(counts)) * data_ranks // dist.world_size()
    return StepLabels(total, label_weights(counts, total, parts))
