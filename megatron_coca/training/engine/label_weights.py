"""Weights of micro-batches by their number of labels. With these weights, a loss is the mean over all labels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_coca.data import Batch
from megatron_coca.training.engine import group as dist


class HeldOutLoss(NamedTuple):
    """The mean loss over the labels of some samples, in nats per token, and the number of labels, over all ranks."""

    mean: float
    labels: int


class StepLabels(NamedTuple):
    """The number of labels of a step, summed over all ranks, and the weights by which this rank multiplies the mean
    losses of its micro-batches.
    """

    labels: int
    weights: list[float]


def label_weights(counts: Sequence[int], total: int, parts: int) -> list[float]:
    """Return weights with which the average of `parts` mean losses becomes the mean over all `total` labels.

    `counts` has the number of labels in some of the parts. A weight is exactly 1 if its part has the average number of
    labels. If there are no labels at all, all weights are 0.
    """
    return [count * parts / total if total else 0.0 for count in counts]


def step_labels(micro_batches: Sequence[Batch], data_ranks: int) -> StepLabels:
    """Count the labels of a step. Each of the `data_ranks` ranks has the same number of micro-batches as this rank.

    Every rank must call this. The ranks communicate only if there are loss masks, and only on the host.
    """
    parts = len(micro_batches) * data_ranks
    masks = [batch.loss_mask for batch in micro_batches if batch.loss_mask is not None]
    if not masks:  # then no rank has loss masks
        return StepLabels(parts * micro_batches[0].tokens[:, 1:].size, [1.0] * len(micro_batches))
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    # Ranks that share a model read the same samples.
    total = dist.sum_on_host(sum(counts)) * data_ranks // dist.world_size()
    return StepLabels(total, label_weights(counts, total, parts))
