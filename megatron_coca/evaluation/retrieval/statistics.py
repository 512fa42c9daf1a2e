"""What a number of cases says: accuracy with its interval."""

import math
from collections.abc import Sequence
from typing import Any

from megatron_coca.evaluation.retrieval.records import Tally

Z = 1.959963984540054
"""Standard normal quantile at 0.975: intervals hold 95%."""


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of `count` trials (Wilson 1927); it stays within 0 .. 1 and is not empty at either.

    For the mean of scores between 0 and 1 that are not all 0 or 1 it is wider than needed: no other scores of that
    mean vary as much as those that are.
    """
    centre = share + Z**2 / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    low, high = (centre - reach) / scale, (centre + reach) / scale
    # At the ends the formula gives the end, but for rounding.
    return (low if share > 0 else 0.0), (high if share < 1 else 1.0)


def whole_tally(scores: Sequence[float]) -> dict[str, Any]:
    """The fields of the tally of scores between 0 and 1, at least one."""
    accuracy = math.fsum(scores) / len(scores)
    low, high = wilson_interval(accuracy, len(scores))
    correct = sum(score == 1 for score in scores)
    return {"accuracy": accuracy, "correct": correct, "count": len(scores), "low": low, "high": high}


def tally(scores: Sequence[float]) -> Tally | None:
    """The tally of scores between 0 and 1; None where there is none."""
    return Tally(**whole_tally(scores)) if scores else None
