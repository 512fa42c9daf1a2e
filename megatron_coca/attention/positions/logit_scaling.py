"""Factors on the logits of a row that grow with its position, against the dilution of softmax over long contexts."""

import math
from collections.abc import Callable

from torch import Tensor

LogitScaling = Callable[[Tensor, int], Tensor]
"""(float64 positions [...], training length L) -> factors [...]."""


def _log_n(positions: Tensor, training_length: int) -> Tensor:
    """max(1, ln(m + 1)/ln L): nothing changes within the training length (Su 2023, kexue.fm/archives/9708)."""
    return _log_n_trained(positions, training_length).clamp(min=1.0)


def _log_n_trained(positions: Tensor, training_length: int) -> Tensor:
    """ln(m + 1)/ln L, m counted from 0, from the first step of training on (Su 2021, kexue.fm/archives/8823; the form
    for a causal model, whose row m sees m + 1 keys, is our reading).
    """
    return positions.log1p() / math.log(training_length)


LOGIT_SCALINGS: dict[str, LogitScaling | None] = {"none": None, "log_n": _log_n, "log_n_trained": _log_n_trained}

TRAINED_SCALINGS = frozenset({"log_n_trained"})
"""Scalings that belong to the weights: they cannot be switched on or off at evaluation time."""
