"""Result files: what they hold, and that they are complete or absent."""

import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError


class EvaluationError(ValueError):
    """An evaluation that cannot be run as asked; the message names the thing, the place and the remedy."""


class Record(BaseModel):
    """Base of what result files hold. Infinite numbers are the texts "Infinity" and "NaN", as JSON has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class WindowResult(Record):
    """One window size over all documents."""

    window: int  # tokens the model reads at a time
    perplexity: float  # exp(nll); infinite where it overflows
    nll: float  # nats, mean over the scored tokens
    tokens_scored: int
    seconds: float
    tokens_per_second: float  # scored tokens
    documents: int
    peak_memory_bytes: int | None  # of the CUDA device; None where the device does not count it


class ProtocolRecord(Record):
    """How was measured; `windows` are the sizes asked for, in that order."""

    text: str
    stride: int
    windows: list[int]
    tokens_per_batch: int


class CheckpointRecord(Record):
    """What was measured: `identity` names the weights, `seq_length` is the length they were trained at."""

    path: str
    identity: str
    step: int | None
    seq_length: int
    pos_emb: str


class DocumentsRecord(Record):
    """On what was measured: `sha256` of lengths and token ids; `tokens` in all, `max_length` of one document."""

    sha256: str
    count: int
    tokens: int
    max_length: int
    sources: list[str]


class EnvironmentRecord(Record):
    """Where was measured. `backend` is the attention backend."""

    dtype: str
    backend: str
    device: str
    torch: str


class PerplexityResult(Record):
    """The file that `evaluate.py perplexity --output` writes."""

    task: Literal["perplexity"] = "perplexity"
    label: str
    protocol: ProtocolRecord
    checkpoint: CheckpointRecord
    overrides: list[str]
    tokenizer: str | None  # fingerprint; None where the checkpoint carries none
    documents: DocumentsRecord
    environment: EnvironmentRecord
    results: list[WindowResult]


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be written ({error.strerror}); free space or choose another") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_record(path: Path, record: Record) -> None:
    """Writes `record` as strict JSON, atomically. Raises EvaluationError."""
    write_atomically(path, (record.model_dump_json(indent=2) + "\n").encode())


def read_perplexity(path: Path) -> PerplexityResult:
    """Reads one result file. Raises EvaluationError where it is missing, unreadable or of another kind."""
    try:
        return PerplexityResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "file"
        reason = f"{place}: {first['msg']}"
        raise EvaluationError(f"{path}: is not a result of `evaluate.py perplexity` ({reason})") from error
