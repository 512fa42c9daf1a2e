"""A result file while it is being measured: written after every cell, continued where it was left."""

import logging
from pathlib import Path
from typing import Any, Generic, TypeVar

from megatron_coca.evaluation.measure import Meter
from megatron_coca.evaluation.results import (
    Cell,
    EvaluationError,
    Missing,
    Record,
    Result,
    check_writable,
    read_record,
    write_record,
)

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Result)

SUFFIX = ".cost.json"
"""Of the file of costs beside a result file."""


class Cost(Record):
    """What one cell cost, interruptions aside."""

    at: str
    seconds: float
    tokens: int  # of the cell's own measure: scored, generated
    tokens_per_second: float
    peak_memory_bytes: int | None  # None where the device does not count it

    @classmethod
    def of(cls, at: str, meter: Meter, tokens: int) -> "Cost":
        """Of what `meter` measured, and `tokens` of the cell came out of."""
        return cls(
            at=at,
            seconds=meter.seconds,
            tokens=tokens,
            tokens_per_second=tokens / max(meter.seconds, 1e-9),
            peak_memory_bytes=meter.peak_memory_bytes,
        )

    def plus(self, other: "Cost") -> "Cost":
        """The cost of both parts of one cell."""
        seconds, tokens = self.seconds + other.seconds, self.tokens + other.tokens
        peaks = [cost.peak_memory_bytes for cost in (self, other) if cost.peak_memory_bytes is not None]
        return Cost(
            at=self.at,
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=tokens / max(seconds, 1e-9),
            peak_memory_bytes=max(peaks, default=None),
        )


class Costs(Record):
    """The file NAME.cost.json."""

    label: str
    task: str
    device: str
    costs: list[Cost]


def cost_path(path: Path) -> Path:
    """Where the costs of a result file stand."""
    return path.with_name(path.name.removesuffix(".json") + SUFFIX)


def read_costs(path: Path) -> Costs | None:
    """The costs of the result file `path`; None where there are none, or where they cannot be read, which is warned of:
    no result depends on them.
    """
    beside = cost_path(path)
    if not beside.is_file():
        return None
    try:
        return read_record(beside, Costs, "a file of costs")
    except EvaluationError as error:
        logger.warning("%s; left out", error)
        return None


class Store(Generic[R]):
    """The result file at `path` (None: in memory alone), as far as it is measured.

    A file of the same measurement is continued: what it has is kept, and what it misses until it is measured. A file of
    another one is replaced if `overwrite`; otherwise it is an EvaluationError, unless it has no results. The file is
    there from the start, so that a process that is killed leaves one.

    Attributes:
        result: what there is.
        noted: what this store was told to be missing.
    """

    def __init__(self, path: Path | None, empty: R, overwrite: bool = False) -> None:
        self.path, self.result = path, empty
        self.costs: dict[str, Cost] = {}
        self.noted: list[Missing] = []
        if path is None:
            return
        check_writable(path)
        if path.exists() and (continued := _continued(path, empty, overwrite)) is not None:
            self.result = continued
            earlier = read_costs(path)
            self.costs = {cost.at: cost for cost in earlier.costs} if earlier is not None else {}
        self.write()

    def get(self, key: tuple[Any, ...]) -> Any:
        """The cell of that key, or None."""
        return next((cell for cell in self.result.results if cell.key == key), None)

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether the cell of that key is there."""
        return self.get(key) is not None

    def put(self, cell: Cell, cost: Cost | None = None) -> None:
        """Add a cell, or put it in the place of the one of its key, and write both files."""
        others = [other for other in self.result.results if other.key != cell.key]
        cells = sorted([*others, cell], key=lambda each: each.key)
        self.result = self.result.model_copy(update={"results": cells})
        if cost is not None:
            earlier = self.costs.get(cost.at)
            self.costs[cost.at] = cost if earlier is None else earlier.plus(cost)
            left = [missing for missing in self.result.missing if missing.at != cost.at]
            self.result = self.result.model_copy(update={"missing": left})
        self.write()

    def miss(self, missing: Missing) -> None:
        """Note what could not be measured, and write."""
        self.noted.append(missing)
        others = [other for other in self.result.missing if other.at != missing.at]
        ordered = sorted([*others, missing], key=lambda each: (len(each.at), each.at))
        self.result = self.result.model_copy(update={"missing": ordered})
        self.write()

    def write(self) -> None:
        """Write what there is. Raises EvaluationError."""
        if self.path is None:
            return
        write_record(self.path, self.result)
        if self.costs:
            ordered = [self.costs[at] for at in sorted(self.costs, key=lambda at: (len(at), at))]
            device = self.result.environment.device
            costs = Costs(label=self.result.label, task=self.result.task, device=device, costs=ordered)
            write_record(cost_path(self.path), costs)


def _continued(path: Path, empty: R, overwrite: bool) -> R | None:
    """What is at `path`, without what it misses as a whole; None where it may be replaced. Raises EvaluationError where
    it holds another measurement.
    """
    what = f"a result of `evaluate.py {empty.task}`"
    try:
        earlier = read_record(path, type(empty), what)
    except EvaluationError as error:
        if overwrite:
            return None
        raise EvaluationError(f"{error}; remove it, or replace it with --overwrite") from error
    before, now = earlier.measurement(), empty.measurement()
    if before == now:
        missing = [each for each in earlier.missing if each.at != "all"]
        return empty.model_copy(update={"results": list(earlier.results), "missing": missing})
    if overwrite or not earlier.results:
        return None
    differing = ", ".join(_differences(before, now))
    raise EvaluationError(
        f"{path}: holds another measurement (its {differing} is another); name another --output, or replace it with "
        "--overwrite"
    )


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """The names in which two measurements differ, dots reaching into groups."""
    found: list[str] = []
    for name in before.keys() | now.keys():
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found.append(prefix + name)
    return sorted(found)
