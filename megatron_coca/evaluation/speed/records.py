"""The result file of `evaluate.py speed`. Here times and memory are the result, so no two files are equal."""

from typing import Literal

from megatron_coca.evaluation.results import Cell, Record, Result

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
