"""Result files: what every one of them holds, and that they are complete or absent.

A result file holds nothing that differs between two runs of the same measurement, so that equal files mean equal
results; what a measurement cost stands in a file beside it (`store.py`).
"""

import logging
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from megatron_coca.atomic_write import write_file


class EvaluationError(ValueError):
    """An evaluation that cannot be run as asked; the message names the thing, the place and the remedy."""


class Record(BaseModel):
    """Base of what result files hold. Infinite numbers are the texts "Infinity" and "NaN", as JSON has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Cell(Record):
    """One number of a table with what it rests on."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """What names this cell among those of its file; files are sorted by it."""


class CheckpointRecord(Record):
    """What was measured: `identity` names the weights, `seq_length` is the length they were last trained at, `trained_with`
    the extension, map and logit scaling that they were trained with, where they were with any, and a rotary base other
    than 10000.
    """

    path: str
    identity: str
    step: int | None
    seq_length: int
    pos_emb: str
    trained_with: dict[str, JsonValue] = {}


class EnvironmentRecord(Record):
    """Where was measured. `backend` is the attention backend, None where no model could be built."""

    dtype: str
    backend: str | None
    device: str
    torch: str


class Missing(Record):
    """A cell, or all cells, that a measurement was asked for and does not have."""

    at: str  # "window 4096", or "all"
    kind: Literal["refused", "out of memory", "not run", "failed"]
    reason: str


class Result(Record):
    """The file of one task of one model in one setting; a task adds its `protocol` and the type of its `results`.

    `overrides` are the keys in which the model is used otherwise than it was trained, with their values.
    """

    task: str
    label: str
    checkpoint: CheckpointRecord
    overrides: dict[str, JsonValue]
    tokenizer: str | None  # fingerprint; None where the checkpoint carries none
    environment: EnvironmentRecord
    results: Sequence[Cell]
    missing: list[Missing]

    def measurement(self) -> dict[str, Any]:
        """What two files share if and only if they hold the same measurement; checkpoint and data may have moved."""
        moved = {"checkpoint": {"path"}, "documents": {"sources"}}
        return self.model_dump(mode="json", exclude={"results": True, "missing": True, **moved})


R = TypeVar("R", bound=Record)


def check_writable(path: Path) -> None:
    """Makes the parent folder of the file `path` and tries to write there. Raises EvaluationError."""
    if path.is_dir():
        raise EvaluationError(f"{path}: is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes `content` beside `path` and renames it, so that a full disk leaves an earlier file as it was.

    Raises EvaluationError where the file cannot be written.
    """
    check_writable(path)
    try:
        write_file(path, content)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error.strerror}); free space or choose another") from error


def write_record(path: Path, record: Record) -> None:
    """Writes `record` as strict JSON, atomically. Raises EvaluationError."""
    write_atomically(path, (record.model_dump_json(indent=2) + "\n").encode())


def read_record(path: Path, kind: type[R], what: str) -> R:
    """Reads one file. Raises EvaluationError where it is missing, unreadable or of another kind than `what` says."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise EvaluationError(f"{path}: is not {what} ({place}: {first['msg']})") from error


_CPU_REFUSAL = "can't allocate memory"
"""What PyTorch's allocator on the CPU says; it has no class of its own for it."""


class Meter:
    """`seconds` and `peak_memory_bytes` of what `measured` enclosed; valid after it."""

    seconds: float = 0.0
    peak_memory_bytes: int | None = None


@contextmanager
def measured(device: torch.device) -> Iterator[Meter]:
    """Measures the enclosed work on `device`.

    The memory is the most that PyTorch held on a CUDA device, and on the CPU by how much the resident memory of the
    process grew at most; None where the system does not tell.
    """
    meter, before = Meter(), _reset_peak(device)
    began = time.perf_counter()
    try:
        yield meter
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        meter.seconds = time.perf_counter() - began
        meter.peak_memory_bytes = _peak(device, before)


def resident_memory() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not tell."""
    return _status("VmRSS")


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device's memory did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_REFUSAL in str(error)


def _reset_peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident_memory()


def _peak(device: torch.device, before: int | None) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _status(field: str) -> int | None:
    """A field of this process's status, in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(field + ":")]
    return int(found[0].split()[1]) * 1024 if found else None


logger = logging.getLogger(__name__)

STORE_R = TypeVar("R", bound=Result)

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


class Store(Generic[STORE_R]):
    """The result file at `path` (None: in memory alone), as far as it is measured.

    A file of the same measurement is continued: what it has is kept, and what it misses until it is measured. A file of
    another one is replaced if `overwrite`; otherwise it is an EvaluationError, unless it has no results. The file is
    there from the start, so that a process that is killed leaves one.

    Attributes:
        result: what there is.
        noted: what this store was told to be missing.
    """

    def __init__(self, path: Path | None, empty: STORE_R, overwrite: bool = False) -> None:
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


def _continued(path: Path, empty: STORE_R, overwrite: bool) -> STORE_R | None:
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
