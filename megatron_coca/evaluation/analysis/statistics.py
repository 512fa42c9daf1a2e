"""Shares, means and quantiles of samples, with None where there are none."""

import math

import numpy as np

from megatron_coca.evaluation.analysis.records import Curve, Quantiles, Share

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def share(holds: np.ndarray, among: np.ndarray | None = None) -> Share:
    """The share of True in `holds`, or in those of its places where `among` is True."""
    taken = holds if among is None else holds[among]
    return float(taken.mean()) if taken.size else None


def mean(values: np.ndarray) -> float | None:
    """The mean of all values."""
    return float(values.mean(dtype=np.float64)) if values.size else None


def quantiles(values: np.ndarray) -> Quantiles:
    """At `QUANTILES`, linear between the samples."""
    return np.quantile(values.astype(np.float64), QUANTILES).tolist() if values.size else None


def curve(samples: list[np.ndarray]) -> Curve:
    """Of the samples of each distance."""
    return Curve(
        mean=[mean(values) for values in samples],
        mean_abs=[mean(np.abs(values)) for values in samples],
        quantiles_abs=[quantiles(np.abs(values)) for values in samples],
        pairs=[values.size for values in samples],
    )


def mean_of_shares(shares: list[Share]) -> Share:
    """The mean of those that there are."""
    known = [each for each in shares if each is not None]
    return math.fsum(known) / len(known) if known else None
