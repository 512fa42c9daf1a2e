"""The result file of `evaluate.py speed`. Here times and memory are the result, so no two files are equal."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import torch

from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.tables import format_table

WHATS: tuple["What", ...] = (
    "layer forward",
    "layer forward+backward",
    "model forward",
    "model forward+backward",
    "decode",
)
What = Literal["layer forward", "layer forward+backward", "model forward", "model forward+backward", "decode"]


class Ratio(Record):
    """Time against that of another method in the same rounds: the median over rounds, and the quartiles."""

    against: str  # the other method's label
    median: float
    low: float
    high: float


class SpeedCell(Cell):
    """One method at one length."""

    what: What
    length: int  # tokens of a row; in `decode` those that the cache holds
    method: str
    backend: str
    seconds: float  # median over rounds, of one pass; in `decode` of one token
    quartiles: tuple[float, float]
    rounds: int
    tokens_per_second: float
    to_rope: Ratio | None  # against RoPE by the same backend, of the contraction by the first; None: not there
    to_contraction: Ratio | None
    peak_memory_bytes: int | None  # beside weights and inputs; gradients count
    cache_bytes_per_token: int | None  # of a row, all layers; in `decode`

    @property
    def key(self) -> tuple[int, int, str]:
        return (WHATS.index(self.what), self.length, self.method)


class MachineRecord(Record):
    """Where was measured, beside the device."""

    processor: str
    threads: int
    versions: dict[str, str]


class ShapeRecord(Record):
    """Of what."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    parameters: int  # of the first method's model


class SpeedProtocol(Record):
    """How was measured."""

    text: str
    rounds: int
    batch: int  # rows
    shape: ShapeRecord


class SpeedResult(Result):
    """Costs by what is done, length and method."""

    task: Literal["speed"] = "speed"
    protocol: SpeedProtocol
    machine: MachineRecord
    results: list[SpeedCell]


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


def tables(result: SpeedResult) -> str:
    """Markdown: a table for each kind of work, rows for each method's time, speed, ratios and memory, by length."""
    return "\n".join(_table(result, what) for what in WHATS if any(cell.what == what for cell in result.results))


def _table(result: SpeedResult, what: str) -> str:
    cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
    lengths = sorted({length for _, length in cells})
    methods = dict.fromkeys(method for method, _ in sorted(cells, key=lambda key: key[1]))
    rows = []
    for method in methods:
        for name, text in COLUMNS.items():
            values = [text(cells[method, length]) if (method, length) in cells else "-" for length in lengths]
            if any(value != "-" for value in values):
                rows.append([f"{method}: {name}", *values])
    title = f"{result.label}, {what}, {result.environment.device}, {result.environment.dtype}"
    shown = f"{title}\n\n{format_table(['method', *map(str, lengths)], rows)}\n"
    alone = dict.fromkeys(method for (method, _), cell in sorted(cells.items()) if cell.to_rope is None)
    return f"{shown}\n{WITHOUT_ROPE}: {', '.join(alone)}\n" if alone else shown


def _ratio_text(given: Ratio | None) -> str:
    return "-" if given is None else f"{given.median:.2f} ({given.low:.2f}-{given.high:.2f})"


WITHOUT_ROPE = "No ratio to RoPE, as at some length RoPE by the same backend was not measured"
COLUMNS: dict[str, Callable[[SpeedCell], str]] = {
    "ms": lambda cell: f"{1000 * cell.seconds:.2f}",
    "to RoPE": lambda cell: _ratio_text(cell.to_rope),
    "to contraction": lambda cell: _ratio_text(cell.to_contraction),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "MiB": lambda cell: "-" if cell.peak_memory_bytes is None else f"{cell.peak_memory_bytes / 2**20:.0f}",
    "cache bytes/token": lambda cell: "-" if cell.cache_bytes_per_token is None else str(cell.cache_bytes_per_token),
}
