"""Times of several calls side by side: in rounds in which all take their turn, so that what slows the machine down for a
while slows all of them down.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from megatron_coca.evaluation.speed.records import Ratio

Key = TypeVar("Key")


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def interleaved(calls: Mapping[Key, Callable[[], object]], count: int, device: torch.device) -> dict[Key, list[float]]:
    """Seconds of `count` calls of each, in turns, after one turn that does not count."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for turn in range(count + 1):
        for key, call in calls.items():
            seconds = seconds_of(call, device)
            if turn > 0:
                times[key].append(seconds)
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(own: list[float], other: list[float], against: str) -> Ratio:
    """Round by round."""
    low, middle, high = quartiles([mine / theirs for mine, theirs in zip(own, other, strict=True)])
    return Ratio(against=against, median=middle, low=low, high=high)
