"""The record, learning curve and state of a cell, and the overview and the archive of all cells.

The archive `RESULTS.jsonl.zst` replaces the results folder next to it, which can then be removed. Each line is one
file: {"file": "CELL/NAME.json", "content": ...}. The archive contains each cell's record (cell.json), its learning
curve, and all measured numbers by seed, document and length.
"""

import json
import logging
import math
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import zstandard

from megatron_coca.ablation.grid import Cell, DataRecord
from megatron_coca.checkpoints import CheckpointError, native
from megatron_coca.data.readers.compression import FEED
from megatron_coca.evaluation.report.curves import (
    CURVE,
    METRICS,
    Curve,
    TrainedStage,
    metrics,
    run_curve,
    trained_stages,
)
from megatron_coca.evaluation.results import (
    EvaluationError,
    Record,
    read_costs,
    read_record,
    write_atomically,
    write_record,
)
from megatron_coca.evaluation.suite import Command
from megatron_coca.support.markdown_tables import format_table
from megatron_coca.support.regular_files import LARGEST, read_regular

logger = logging.getLogger(__name__)

RECORD = "cell.json"
METRICS_TAIL = 20_000
"""Number of bytes at the end of a run's metrics that `last_step` reads."""


class CellRecord(Record):
    """The identity, state and cost of a cell. Seconds are summed over all calls that resumed the cell.

    Attributes:
        status: the recorded state. If it is "failed", `reason` is set, and the next call runs the cell again.
        training_seconds: time of steps, validations and saves, from the trainer's reports.
        evaluation_seconds: time of the measurements, from their cost files.
        overhead_seconds: all other time: process starts, loading of data and models, and work repeated after an
            interruption. The time of a call that was killed is not counted.
        preloaded: names of the libraries in LD_PRELOAD, which can change the kernels of MKL (docs/speed.md).
        evaluated: the digest from `Cell.measurements` of each complete result file, by its path in `Cell.results`.
        inputs: the digest from `Cell.inputs` of each such file; empty in records of earlier versions.
    """

    model: str
    seed: int
    hash: str
    status: Literal["started", "trained", "done", "failed"]
    reason: str | None = None
    steps: int
    tokens: int
    parameters: int
    non_embedding_parameters: int
    data: DataRecord | None = None
    training_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    overhead_seconds: float = 0.0
    device: str | None = None
    threads: int | None = None
    torch: str | None = None
    commit: str | None = None
    preloaded: list[str] = []
    evaluated: dict[str, str] = {}
    inputs: dict[str, str] = {}


class State(Enum):
    """The state of a cell, determined from its files."""

    DONE = "done"
    TRAINED = "trained"
    STARTED = "started"
    FAILED = "failed"
    WAITING = "waiting"


def read_cell(cell: Cell) -> CellRecord:
    """Return the record of a cell, or a new record if there is none. Raises EvaluationError for a damaged file."""
    path = cell.results / RECORD
    if path.is_file():
        return _read(path)
    count = cell.parameters
    return CellRecord(
        model=cell.model,
        seed=cell.seed,
        hash=cell.name.rpartition("-")[2],
        status="started",
        steps=cell.steps,
        tokens=cell.tokens,
        parameters=count.total,
        non_embedding_parameters=count.non_embedding,
        data=cell.data,
    )


def recorded_data(results: Path) -> dict[str, DataRecord]:
    """Return the data of the cells in a results folder, by `DataRecord.chosen_by`. Raises EvaluationError."""
    records = [_read(path) for path in sorted(results.glob(f"*/{RECORD}"))]
    return {record.data.chosen_by: record.data for record in records if record.data is not None}


def _read(path: Path) -> CellRecord:
    try:
        return read_record(path, CellRecord, "the record of a cell")
    except EvaluationError as error:
        raise EvaluationError(
            f"{error}; restore the file, or remove it to evaluate the cell again without training"
        ) from error


def write_cell(cell: Cell, record: CellRecord) -> None:
    write_record(cell.results / RECORD, record)


def state_of(cell: Cell) -> State:
    record = read_cell(cell)
    if not missing_commands(cell, record) and (cell.results / CURVE).is_file():
        return State.DONE
    if record.status == "failed":
        return State.FAILED
    if is_trained(cell):
        return State.TRAINED
    return State.STARTED if native.begun_steps(cell.run) else State.WAITING


def missing_commands(cell: Cell, record: CellRecord) -> list[Command]:
    """Return the evaluation commands with a result file that is missing, incomplete or outdated."""
    measured = set(measured_files(cell, record))
    return [command for command in cell.commands if not measured.issuperset(command.files)]


def measured_files(cell: Cell, record: CellRecord) -> list[Path]:
    """Return the complete result files of a cell.

    A file is left out if the options, variant or input files of its evaluation have changed since it was written.
    """
    digests, known = cell.measurements, record.evaluated
    current = [path for path, digest in digests.items() if known.get(str(path)) == digest]
    changed = [path for path, digest in cell.inputs.items() if record.inputs.get(str(path)) not in (None, digest)]
    files = [cell.results / path for path in current if path not in changed]
    return [path for path in files if path.is_file() and _is_whole(path)]


def _is_whole(path: Path) -> bool:
    """Return True if a result file is intact. Warn about a damaged file, which will be measured again."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        logger.warning("%s: damaged (%s); it counts as missing and will be measured again", path, error)
        return False
    return True


def is_trained(cell: Cell) -> bool:
    """Return True if the checkpoint of the last step exists and the validation after this step is done."""
    try:
        if cell.steps not in native.steps(cell.run):
            return False
        meta = native.read_meta(native.step_folder(cell.run, cell.steps))
        return not (meta.get("progress") or {}).get("unvalidated", False)
    except CheckpointError as error:
        logger.warning("%s", error)
        return False


def training_seconds(run: Path, until: int | None = None) -> float:
    """Return the seconds of steps, validations and saves up to step `until`, from the trainer's reports."""
    seconds, before = 0.0, 0
    for report in metrics(run):
        if "step_seconds" not in report or (until is not None and report["step"] > until):
            continue
        other = report.get("save_share", 0.0) + report.get("eval_share", 0.0)
        seconds += report["step_seconds"] * (report["step"] - before) / max(1e-9, 1.0 - other)
        before = report["step"]
    return seconds


def last_step(run: Path) -> int:
    """Return the last step in a run's metrics, or 0. Only the end of the file is read, because this is called often."""
    path = run / METRICS
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - METRICS_TAIL))
        steps = re.findall(rb'"step": (\d+)', file.read())
    return int(steps[-1]) if steps else 0


def evaluation_seconds(cell: Cell) -> float:
    costs = [read_costs(file) for command in cell.commands for file in command.files]
    return math.fsum(cost.seconds for each in costs if each is not None for cost in each.costs)


def write_curve(cell: Cell) -> None:
    """Write the learning curve from the run's metrics into the results folder."""
    stages = [TrainedStage(0, cell.batch * cell.config.model.seq_length)]
    if cell.config.schedule.stages:
        stages = trained_stages(native.read_meta(native.locate(cell.run)), cell.config.model.seq_length)
    write_record(cell.results / CURVE, run_curve(cell.run, cell.seed, stages))


def read_curve(cell: Cell) -> Curve | None:
    path = cell.results / CURVE
    return read_record(path, Curve, "a learning curve") if path.is_file() else None


def only_unsupported(files: Sequence[Path]) -> bool:
    """Return True if all result files exist and no run can compute any of their missing entries.

    Raises EvaluationError for a file that is not a result.
    """
    if not all(file.is_file() for file in files):
        return False
    try:
        missing = [entry["kind"] for file in files for entry in json.loads(file.read_bytes())["missing"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{files[0].parent}: contains a file that is not a result ({error}); remove the file"
        ) from error
    return all(kind == "refused" for kind in missing)


def overview(cells: Sequence[Cell]) -> str:
    """Return a table of the cells with the state, the size and the seconds so far of each cell."""
    rows = []
    for cell in cells:
        record, count = read_cell(cell), cell.parameters
        seconds = (record.training_seconds, record.evaluation_seconds, record.overhead_seconds)
        shown = [f"{value:,.0f}" for value in seconds]
        sizes = (count.total, count.non_embedding, cell.tokens)
        rows.append((cell.name, state_of(cell).value, *sizes, *shown, record.reason or ""))
    sizes_head = ("parameters", "non-embedding", "tokens")
    return format_table(("cell", "state", *sizes_head, "training s", "evaluation s", "overhead s", "reason"), rows)


# Archive

LEVEL = 19


def archive_of(results: Path) -> Path:
    """Return the path of the archive that belongs to a results folder."""
    return results.with_name(f"{results.name}.jsonl.zst")


def pack(results: Path) -> Path:
    """Write the archive of the cells in a results folder.

    Raises EvaluationError if there are no results or the archive cannot be written.
    """
    # A task that a file repeats as `TASK WORD` has a separate folder inside the cell's folder.
    files = sorted(file for cell in results.glob(f"*/{RECORD}") for file in cell.parent.rglob("*.json"))
    if not files:
        raise EvaluationError(f"{results}: no results to pack; run the ablation first")
    lines = [{"file": str(file.relative_to(results)), "content": json.loads(file.read_bytes())} for file in files]
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines).encode()
    if len(text) > LARGEST:
        raise EvaluationError(
            f"{results}: its results take {len(text) >> 20} MiB, but an archive contains at most {LARGEST >> 20} MiB; "
            "pack the cells in several folders"
        )
    write_atomically(archive_of(results), zstandard.ZstdCompressor(level=LEVEL).compress(text))
    return archive_of(results)


def _lines(archive: Path) -> list[bytes]:
    """Return the lines of an archive. Raises ValueError if it is not exactly one complete frame, or is too large.

    This does not use `zstandard.open`, which raises no error if a file was cut off or contains several archives.
    """
    decoder, packed, content = zstandard.ZstdDecompressor().decompressobj(), read_regular(archive), bytearray()
    for start in range(0, len(packed), FEED):
        if decoder.eof:
            raise ValueError("data follows the archive")
        content += decoder.decompress(packed[start : start + FEED])
        if len(content) > LARGEST:
            raise ValueError(f"its content is larger than {LARGEST >> 20} MiB")
    if not decoder.eof:
        raise ValueError("it was cut off")
    if decoder.unused_data:
        raise ValueError("data follows the archive")
    return bytes(content).splitlines()


def packed_records(results: Path) -> list[dict[str, Any]]:
    """Return the records (cell.json) in the archive of a results folder, or an empty list without an archive.

    Raises ValueError if the archive is damaged.
    """
    archive = archive_of(results)
    entries = map(json.loads, _lines(archive)) if archive.is_file() else ()
    return [entry["content"] for entry in entries if Path(entry["file"]).name == RECORD]


def unpack(results: Path) -> None:
    """Extract the files that the results folder lacks from its archive, if there is one. Raises EvaluationError."""
    archive = archive_of(results)
    if not archive.is_file():
        return
    try:
        for line in _lines(archive):
            entry = json.loads(line)
            path = results / entry["file"]
            if not path.resolve().is_relative_to(results.resolve()):
                raise EvaluationError(
                    f"{archive}: contains {entry['file']}, which is outside {results}; restore the archive"
                )
            if not path.exists():
                content = json.dumps(entry["content"], indent=2, ensure_ascii=False) + "\n"
                write_atomically(path, content.encode())
    except (OSError, ValueError, KeyError, RecursionError, zstandard.ZstdError) as error:
        if isinstance(error, EvaluationError):
            raise
        raise EvaluationError(f"{archive}: damaged ({error}); restore it from version control") from error
