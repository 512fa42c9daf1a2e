"""Result files: their records, atomic writing, costs, and the store from which a measurement resumes.

Two runs of the same measurement write equal result files. Seconds and memory differ between runs, so they are in a
second file, NAME.cost.json.
"""

import json
import logging
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from megatron_coca import methods
from megatron_coca.config.position import ORIGINAL
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.crowded_cores import CrowdedCores
from megatron_coca.support.errors import InputError, why_not_written
from megatron_coca.support.regular_files import read_regular
from megatron_coca.support.safe_yaml import YamlFault, read_yaml
from megatron_coca.work.locks import exclusive_lock

if TYPE_CHECKING:
    import torch  # not imported at run time: the command line declares its options without PyTorch

logger = logging.getLogger(__name__)

SUFFIX = ".cost.json"
"""Suffix of the name of a cost file."""


class EvaluationError(InputError, ValueError):
    """Raised if an evaluation cannot run as requested. The message names the subject, the problem and the remedy."""


class Record(BaseModel):
    """Base of all records in result files. JSON cannot represent infinity and NaN, so they are written as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


ADDED = frozenset(
    {
        "checkpoint.network",
        "checkpoint.recipe",
        "protocol.chat.symbols",
        "protocol.prompts_sha256",
        "protocol.text_sha256",
    }
)
"""Fields that may be missing in files of earlier versions. Comparisons of measurements ignore a missing field."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A number between 0 and 1, such as an accuracy. NaN in such a field makes a result file invalid."""

OPEN = ConfigDict(extra="ignore")
"""Configuration of a record that had more fields in earlier versions: extra fields are ignored."""


class Entry(Record):
    """One measured number of a result, with the values from which it is computed."""

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """Return the key that identifies the entry in its file; entries are sorted by their keys."""


class CheckpointRecord(Record):
    """The measured checkpoint. `identity` is a digest of its content; `seq_length` is the length of its last training.

    `network` is a digest of the keys that determine how the weights are used. Our own checkpoints need it, because
    their `identity` covers the weights only. `trained_with` lists the frequency extension, distance map and logit
    scaling used in training, and a rotary base other than 10000. `seed` is the training seed; a measurement is
    identified by `identity`, not by the seed. `recipe` holds the keys of the training that are not at their defaults:
    optimizer, schedule, batch size, initial values, and how the data were drawn.
    """

    path: str
    identity: str
    step: int | None
    seq_length: int
    pos_emb: str
    trained_with: dict[str, JsonValue] = {}
    seed: int | None = None  # None for weights from other projects and in files of earlier versions
    network: str | None = None  # None in files of earlier versions
    recipe: dict[str, JsonValue] | None = None  # None for weights from other projects and in files of earlier versions


class EnvironmentRecord(Record):
    """Hardware and numerics. `backend` is the attention backend, None if no model could be built."""

    dtype: str
    backend: str | None
    device: str
    torch: str


class Missing(Record):
    """A requested entry that has no result. `at` is "all" if no entry has one.

    `kind` is "refused" if the model does not support the entry.
    """

    at: str  # "window 4096", or "all"
    kind: Literal["refused", "out of memory", "not run", "failed"]
    reason: str

    @property
    def shown(self) -> str:
        """The kind as shown to users."""
        return "not supported" if self.kind == "refused" else self.kind


class Result(Record):
    """The result file of one task and one variant; each task adds its `protocol` and the type of its `results`.

    `overrides` are the config keys that evaluation changes, with their values.
    """

    task: str
    label: str
    checkpoint: CheckpointRecord
    overrides: dict[str, JsonValue]
    tokenizer: str | None  # fingerprint; None if the checkpoint has no tokenizer
    environment: EnvironmentRecord
    results: Sequence[Entry]
    missing: list[Missing]

    @property
    def setting(self) -> str:
        """The training length, followed by the frequency extension and its original length if there is an extension."""
        length = self.checkpoint.seq_length
        scaling: Any = self.overrides.get("rope_scaling", self.checkpoint.trained_with.get("rope_scaling"))
        if not scaling:
            return f"trained at {length}"
        extension = methods.find("rope_scaling", scaling["rope_type"])
        origin = f" from {scaling.get(ORIGINAL) or length}" if extension.measures_length else ""
        return f"trained at {length}, {extension.name}{origin}"

    def measurement(self) -> dict[str, Any]:
        """Return the fields that identify a measurement. Paths can differ between runs, so they are left out."""
        moved: Any = {"checkpoint": {"path", "seed"}, "documents": {"sources"}}
        moved["protocol"] = {"haystack": {"name"}, "evaluator": {"path"}}
        return self.model_dump(mode="json", exclude={"results": True, "missing": True, **moved})


class DocumentsRecord(Record):
    """The documents of a result file.

    `sha256` covers their lengths and token ids (little-endian int64); `tokens` is their total number of tokens.
    """

    sha256: str
    count: int
    tokens: int
    max_length: int  # maximum tokens per document
    repeated: int | None  # length of the prefix that is tiled to max_length; None if documents are not tiled
    start: int | None = None  # token id put before every document
    sources: list[str]


class Cost(Record):
    """Cost of one entry, summed over all runs that resumed it."""

    at: str
    seconds: float
    tokens: int  # scored or generated tokens, depending on the task
    tokens_per_second: float
    peak_memory_bytes: int | None  # None if the system does not report it

    @classmethod
    def of(cls, at: str, meter: "Meter", tokens: int) -> "Cost":
        speed = tokens / max(meter.seconds, 1e-9)
        peak = meter.peak_memory_bytes
        return cls(at=at, seconds=meter.seconds, tokens=tokens, tokens_per_second=speed, peak_memory_bytes=peak)

    def plus(self, other: "Cost") -> "Cost":
        peaks = [cost.peak_memory_bytes for cost in (self, other) if cost.peak_memory_bytes is not None]
        both = Meter(self.seconds + other.seconds, max(peaks, default=None))
        return Cost.of(self.at, both, self.tokens + other.tokens)


class Costs(Record):
    label: str
    task: str
    device: str
    costs: list[Cost]


RecordType = TypeVar("RecordType", bound=Record)
ResultType = TypeVar("ResultType", bound=Result)


Show = Callable[..., None]
"""A function that shows complete results of one task to the user, side by side: `show(*results)`."""


def check_writable(path: Path) -> None:
    """Create the parent folder of the file `path` and try to write there. Raises EvaluationError."""
    if path.is_dir():
        raise EvaluationError(f"{path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise EvaluationError(f"{path}: is not a regular file; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise EvaluationError(f"{path}: {why_not_written(error, 'choose another path')}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file and rename it, so that a full disk leaves the earlier file intact.

    Raises EvaluationError.
    """
    check_writable(path)
    try:
        write_file(path, content)
    except OSError as error:
        raise EvaluationError(f"{path}: {why_not_written(error, 'choose another path')}") from error


def write_record(path: Path, record: Record) -> None:
    write_atomically(path, (record.model_dump_json(indent=2) + "\n").encode())


def read_record(path: Path, kind: type[RecordType], noun: str) -> RecordType:
    """Read a record of type `kind` from a file. `noun` names the record in messages.

    Raises EvaluationError if the file is missing or unreadable, or if its content is not such a record.
    """
    try:
        return kind.model_validate_json(read_regular(path))
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "file"
        raise EvaluationError(f"{path}: is not {noun} ({field}: {first['msg']})") from error


def read_yaml_file(path: Path) -> Any:
    """Read one YAML file. Raises EvaluationError."""
    try:
        return read_yaml(path)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror}); check path and permissions") from error
    except YamlFault as error:
        raise EvaluationError(error.at(str(path))) from error
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def validated(path: Path, content: Any, kind: type[RecordType], noun: str) -> RecordType:
    """Return the content of the file `path` as a record. `noun` names the record in messages.

    Raises EvaluationError, which lists all faults.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        said = {"extra_forbidden": "unknown key", "missing": "required, but not set"}
        faults = {".".join(map(str, each["loc"])) or "file": each for each in error.errors()}
        unknown = [key for key, each in faults.items() if each["type"] == "extra_forbidden" and len(each["loc"]) == 1]
        lines = [f"{key}: {said.get(faults[key]['type'], faults[key]['msg'])}" for key in faults if key not in unknown]
        if unknown:
            named = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            lines.append(f"{named}: unknown key; the keys of {noun} are {', '.join(kind.model_fields)}")
        raise EvaluationError(f"{path}: is not {noun}: {'; '.join(lines)}") from error


def cost_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".json") + SUFFIX)


def recorded(path: Path | None, *keys: str) -> str | None:
    """Return the string at these nested keys of the result file `path`, or None if there is no such file or string."""
    try:
        content = {} if path is None else json.loads(path.read_bytes())
        for key in keys:
            content = content[key]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return content if isinstance(content, str) else None


def read_costs(path: Path) -> Costs | None:
    """Return the costs of the result file `path`, or None if it has none. Unreadable costs cause only a warning."""
    if not cost_path(path).is_file():
        return None
    try:
        return read_record(cost_path(path), Costs, "a cost file")
    except EvaluationError as error:
        logger.warning("%s; its costs are left out", error)
        return None


@dataclass
class Meter:
    """Time and memory of a `with measured(...)` block. They are set when the block ends."""

    seconds: float = 0.0
    peak_memory_bytes: int | None = None


@cache
def _cores(threads: int) -> CrowdedCores:
    """Return the one object of this process that detects crowded cores, so that it warns only once."""
    return CrowdedCores(threads)


@contextmanager
def measured(device: "torch.device") -> Iterator[Meter]:
    """Measure the enclosed work on `device`.

    On a CUDA device, PyTorch measures the peak memory. On the CPU, the peak memory is the growth of the process's
    resident memory, or None if the system does not report it. If the cores were crowded, a warning is logged.
    """
    import torch

    meter, before = Meter(), None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _cores(torch.get_num_threads()).restart()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
            before = resident_memory()
        except OSError:
            pass
    start = time.perf_counter()
    try:
        yield meter
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif (crowded := _cores(torch.get_num_threads()).look()) is not None:
            logger.warning(crowded)
        meter.seconds = time.perf_counter() - start
        if device.type == "cuda":
            meter.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        elif before is not None and (peak := resident_memory("VmHWM")) is not None:
            meter.peak_memory_bytes = max(0, peak - before)


def resident_memory(field: str = "VmRSS") -> int | None:
    """Return a memory field of /proc/self/status in bytes, or None if the field is not available."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = [int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")]
    return values[0] if values else None


def out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # PyTorch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


class Store(Generic[ResultType]):
    """The result file at `path`, written after every entry. If `path` is None, the result is in memory only.

    A file of the same measurement is resumed and keeps its entries. A file of another measurement is replaced if it has
    no results or if `overwrite` is set; otherwise EvaluationError is raised. The file is created at once, so it exists
    even if the process is killed. Several processes may write to one file: each reads the file again before writing.

    Attributes:
        result: the content of the file.
        noted: the missing entries recorded in this run.
    """

    def __init__(self, path: Path | None, empty: ResultType, overwrite: bool = False) -> None:
        self.path, self.result = path, empty
        self.costs: dict[str, Cost] = {}
        self.noted: list[Missing] = []
        if path is None:
            return
        check_writable(path)
        with self._latest(lambda: _same_measurement(path, empty, overwrite)):
            missing = [entry for entry in self.result.missing if entry.at != "all"]
            self.result = self.result.model_copy(update={"missing": missing})

    def get(self, key: tuple[Any, ...]) -> Any:
        return next((entry for entry in self.result.results if entry.key == key), None)

    def put(self, entry: Entry, cost: Cost | None = None) -> None:
        """Add or replace an entry and write the files. With `cost`, remove `cost.at` from the missing entries."""
        with self._latest():
            others = [other for other in self.result.results if other.key != entry.key]
            missing = self.result.missing
            if cost is not None:
                earlier = self.costs.get(cost.at)
                self.costs[cost.at] = cost if earlier is None else earlier.plus(cost)
                missing = [other for other in missing if other.at != cost.at]
            entries = sorted([*others, entry], key=lambda entry: entry.key)
            self.result = self.result.model_copy(update={"results": entries, "missing": missing})

    def miss(self, missing: Missing) -> None:
        self.noted.append(missing)
        with self._latest():
            others = [other for other in self.result.missing if other.at != missing.at]
            ordered = sorted([*others, missing], key=lambda entry: (len(entry.at), entry.at))
            self.result = self.result.model_copy(update={"missing": ordered})

    @contextmanager
    def _latest(self, read: Callable[[], ResultType | None] | None = None) -> Iterator[None]:
        """Hold the file's lock. Read `result` and `costs` from disk, let the caller change them, and write them."""
        if self.path is None:
            yield
            return
        with exclusive_lock(self.path.with_name(f".{self.path.name}.lock"), EvaluationError, busy=None, temporary=True):
            if self.path.exists():
                read = read or partial(_same_measurement, self.path, self.result, overwrite=False)
                if (found := read()) is not None:
                    update = {"results": list(found.results), "missing": found.missing}
                    self.result = self.result.model_copy(update=update)
                    costs = read_costs(self.path)
                    self.costs = {cost.at: cost for cost in costs.costs} if costs is not None else {}
            yield
            self._write(self.path)

    def _write(self, path: Path) -> None:
        write_record(path, self.result)
        if self.costs:
            result = self.result
            costs = sorted(self.costs.values(), key=lambda cost: (len(cost.at), cost.at))
            record = Costs(label=result.label, task=result.task, device=result.environment.device, costs=costs)
            write_record(cost_path(path), record)


def _same_measurement(path: Path, empty: ResultType, overwrite: bool) -> ResultType | None:
    """Return the result at `path` if its measurement is the same as that of `empty`, or None if it may be replaced.

    Raises EvaluationError for another measurement that may not be replaced.
    """
    try:
        earlier = read_record(path, type(empty), f"a result of `megatron-coca evaluate {empty.task}`")
    except EvaluationError as error:
        if overwrite:
            return None
        raise EvaluationError(f"{error}; remove the file, or replace it with --overwrite") from error
    differing = ", ".join(differences(earlier.measurement(), empty.measurement()))
    if not differing:
        return earlier
    if overwrite or not earlier.results:
        return None
    raise EvaluationError(
        f"{path}: contains another measurement (different {differing}); name another --output, or replace it with "
        "--overwrite"
    )


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the names of the fields in which two measurements differ, such as `protocol.seed`."""
    names: list[str] = []
    for name in before.keys() | now.keys():
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            names += differences(one, other, f"{prefix}{name}.")
        elif one is None and prefix + name in ADDED:
            continue
        elif one != other or (name in before) != (name in now):
            names.append(prefix + name)
    return sorted(names)
