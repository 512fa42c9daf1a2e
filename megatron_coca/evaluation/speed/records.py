"""The result file of `evaluate.py speed`, and its tables. Times differ from run to run, so no two files are equal."""

from collections.abc import Callable
from typing import Literal

from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.evaluation.speed import WHATS, What
from megatron_coca.tables import format_table


class Ratio(Record):
    """Time relative to another method in the same rounds: median and quartiles over rounds."""

    against: str  # the other method's label
    median: float
    low: float
    high: float


class SpeedCell(Cell):
    """One method at one length."""

    what: What
    length: int  # tokens of a row; in `decode` the tokens in the cache
    method: str
    backend: str
    seconds: float  # median over rounds, of one pass; in `decode` of one token
    quartiles: tuple[float, float]
    rounds: int
    tokens_per_second: float
    to_rope: Ratio | None  # to RoPE by the same backend, of the contraction to the first; None: not measured
    to_contraction: Ratio | None
    peak_memory_bytes: int | None  # beside weights and inputs; includes gradients
    cache_bytes_per_token: int | None  # of a row, all layers; in `decode`

    @property
    def key(self) -> tuple[int, int, str]:
        return (WHATS.index(self.what), self.length, self.method)


class MachineRecord(Record):
    """The machine, beside the device."""

    processor: str
    threads: int
    versions: dict[str, str]


class ShapeRecord(Record):
    """The shape of the models."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    parameters: int  # of the first method's model


class SpeedProtocol(Record):
    """The protocol of the measurement."""

    text: str
    rounds: int
    batch: int  # rows
    shape: ShapeRecord


class SpeedResult(Result):
    """Times by kind of work, length and method."""

    task: Literal["speed"] = "speed"
    protocol: SpeedProtocol
    machine: MachineRecord
    results: list[SpeedCell]


def _ratio_text(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


ROWS: dict[str, Callable[[SpeedCell], str]] = {
    "ms": lambda cell: f"{1000 * cell.seconds:.2f}",
    "to RoPE": lambda cell: _ratio_text(cell.to_rope),
    "to contraction": lambda cell: _ratio_text(cell.to_contraction),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "MiB": lambda cell: "-" if cell.peak_memory_bytes is None else f"{cell.peak_memory_bytes / 2**20:.0f}",
    "cache bytes/token": lambda cell: "-" if cell.cache_bytes_per_token is None else str(cell.cache_bytes_per_token),
}
"""The rows of a method in a table."""


def tables(result: SpeedResult) -> str:
    """Markdown: for each kind of work a table of all methods by length."""
    shown = []
    for what in WHATS:
        cells = {(cell.method, cell.length): cell for cell in result.results if cell.what == what}
        if not cells:
            continue
        lengths = sorted({length for _, length in cells})
        rows = []
        for method in dict.fromkeys(method for method, _ in sorted(cells, key=lambda key: key[1])):
            for name, text in ROWS.items():
                values = [text(cells[method, length]) if (method, length) in cells else "-" for length in lengths]
                if any(value != "-" for value in values):
                    rows.append([f"{method}: {name}", *values])
        title = f"{result.label}, {what}, {result.environment.device}, {result.environment.dtype}"
        shown.append(f"{title}\n\n{format_table(['method', *map(str, lengths)], rows)}\n")
        if alone := dict.fromkeys(method for (method, _), cell in sorted(cells.items()) if cell.to_rope is None):
            remark = "No ratio to RoPE, as at some length RoPE by the same backend was not measured"
            shown[-1] += f"\n{remark}: {', '.join(alone)}\n"
    return "\n".join(shown)
