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
    """The labels of a step over all ranks, and for each micro-batch of this rank the weight of its mean loss."""

    count: int
    weights: list[float]


def label_weights(counts: Sequence[int], total: int, parts: int) -> list[float]:
    """Return weights with which the plain average of `parts` means is the mean over all `total` labels.

    `counts` are the labels of some of the parts. A weight is exactly 1 if its part has the average number, and 0 if
    there are no labels at all.
    """
    return [count * parts / total if total else 0.0 for count in counts]


def step_labels(micro_batches: Sequence[Batch], data_ranks: int) -> StepLabels:
    """Count the labels of a step, of which this rank has `micro_batches` and each of `data_ranks` ranks as many.

    Every rank must call it. Only with loss masks do the ranks communicate, on the host.
    """
    parts = len(micro_batches) * data_ranks
    if micro_batches[0].loss_mask is None:  # then no rank has one
        return StepLabels(parts * micro_batches[0].tokens[:, 1:].size, [1.0] * len(micro_batches))
    counts = [int(np.count_nonzero(batch.loss_mask)) for batch in micro_batches]
    total = (
        dist.sum_on_host(sum(counts)) * data_ranks // dist.world_size()
    )  # ranks that share a model have the same samples
    return StepLabels(total, label_weights(counts, total, parts))
