"""Logit scalings: factors on the logits of a query that depend on its position."""

import math
from collections.abc import Callable

from torch import Tensor

LogitFactors = Callable[..., Tensor]
"""(float64 positions [...], training length L, options by name) -> factors [...]."""


def _log_n(positions: Tensor, training_length: int) -> Tensor:
    """Return max(1, ln(m + 1)/ln L), which is 1 within the training length (Su 2023, kexue.fm/archives/9708)."""
    return _log_n_trained(positions, training_length).clamp(min=1.0)


def _log_n_trained(positions: Tensor, training_length: int) -> Tensor:
    """Return ln(m + 1)/ln L with m counted from 0. It applies from the first training step on (Su 2021,
    kexue.fm/archives/8823). The form for a causal model, in which row m sees m + 1 keys, is our
    interpretation of the article.
    """
    return positions.log1p() / math.log(training_length)


def _ssmax(positions: Tensor, training_length: int) -> Tensor:
    """Return ln(m + 1), which each head multiplies by a learned factor s. For a row that sees n = m + 1 keys, softmax
    then uses n^(s z) instead of e^z (Nakanishi 2025, "Scalable-Softmax Is Superior for Attention", section 3).
    """
    return positions.log1p()


def _temperature(positions: Tensor, training_length: int, strength: float, period: int, first: int) -> Tensor:
    """Return 1 + strength * ln(1 + floor((m + first) / period)). It is constant within a period, and 1 in the first
    period (Meta 2025, Llama 4's code; Mistral AI 2025, Ministral 3's code).
    """
    return 1 + strength * ((positions + first) / period).floor().log1p()


LOGIT_SCALINGS: dict[str, LogitFactors] = {
    "log_n": _log_n,
    "log_n_trained": _log_n_trained,
    "ssmax": _ssmax,
    "temperature": _temperature,
}
