"""Where figures are kept: a JSON line per report, TensorBoard, Weights & Biases."""

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_coca.atomic_write import write_file
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import Config, ConfigError

Figures = Mapping[str, float | None]
"""Values by name. None stands for what does not exist at this step, such as the norm of a skipped one."""

UNSAVED = Path("runs/unsaved")
"""Where the figures of a run go that names no folder of its own."""

TIMINGS = frozenset(
    {
        "tokens_per_second",
        "tokens_per_second_per_device",
        "step_seconds",
        "tflops_per_device",
        "mfu",
        "peak_memory_gib",
        "data_wait",
        "save_share",
        "eval_share",
        "eta_seconds",
    }
)
"""Figures of time and memory, which no two runs share."""


class StepFigures(NamedTuple):
    """What one optimizer step gives to report.

    Attributes:
        loss: in nats per token over all ranks; a 0-dimensional tensor is read only when a report is due.
        grad_norm: before clipping, likewise; None where the step has none.
        lr: the learning rate that the step took.
        skipped: whether the optimizer left the weights as they were; may be a tensor too.
        loss_scale: of float16 training; None without.
    """

    loss: float | Tensor
    grad_norm: float | Tensor | None
    lr: float
    skipped: bool | Tensor = False
    loss_scale: float | None = None


class RankFigures(Protocol):
    """Collects a few numbers of every rank."""

    def __call__(self, values: list[float], /) -> list[list[float]]:
        """The values of all ranks, by rank. All ranks call it together, with equally many values."""
        ...


def run_folder(config: Config) -> Path:
    """Where the figures of a run are kept: `log_dir`, else `save`, else `UNSAVED`."""
    return Path(config.logging.log_dir or config.checkpoint.save or UNSAVED)


def last_step(config: Config) -> int:
    """The step after which this launch ends: that of `exit_interval`, or of `train_iters`."""
    steps = config.schedule.train_iters
    assert steps is not None, "training has checked it"
    return min(steps, config.logging.exit_interval or steps)


def as_number(value: float | Tensor | None) -> float | None:
    """A plain number; on a GPU this waits for the tensor's value."""
    return None if value is None else float(value)


logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
OLDER_FILES = 10
WANDB_RUN = "wandb.json"


class Sink(Protocol):
    """Takes what a run reports."""

    def report(self, step: int, figures: Figures) -> None:
        """`step` is the number of completed steps."""
        ...

    def note(self, step: int, message: str) -> None:
        """One line on something odd."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonLines:
    """One JSON object per report in `metrics.jsonl`; a note is one too, with its text as `event`.

    A resumed run first drops the lines of steps that it will repeat; a fresh one keeps the lines of an older run in
    one of at most ``OLDER_FILES`` numbered files. Numbers that JSON does not have (not a number, infinite) are null.
    """

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        kept = [line for line in _lines(path) if line["step"] <= start] if start else []
        if path.is_file() and not start:
            _keep_older(path)
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._path, self._file = path, path.open("a")

    def report(self, step: int, figures: Figures) -> None:
        self._write({"step": step} | {name: _finite(value) for name, value in figures.items()})

    def note(self, step: int, message: str) -> None:
        self._write({"step": step, "event": message})

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `report` has told of a full disk already
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written ({error}); complete checkpoints are intact"
            ) from error


class TensorBoard:
    """Scalars, and notes as text, for TensorBoard. What an earlier process wrote of repeated steps is hidden."""

    def __init__(self, folder: str, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra: imported only where it is asked for

        self._writer = SummaryWriter(folder, purge_step=start + 1)

    def report(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def note(self, step: int, message: str) -> None:
        self._writer.add_text("event", message, step)

    def close(self) -> None:
        self._writer.close()


class _Logged(NamedTuple):
    """What is known of the run at Weights & Biases: its id and the last step that it was given."""

    id: str
    step: int


class WandB:
    """A run at Weights & Biases; WANDB_MODE=offline keeps it on disk.

    The run's id and its last step lie in `wandb.json` of the run's folder. A resumed run goes on under that id, and
    steps that it repeats are not given a second time: its history cannot be taken back.
    """

    def __init__(self, config: Config, folder: Path, start: int) -> None:
        import wandb  # an extra: imported only where it is asked for

        keys = config.logging
        self._path = folder / WANDB_RUN
        before = _read_run(self._path) if start else None
        self._given = before.step if before else 0
        settings = wandb.Settings(base_url=keys.wandb_host) if keys.wandb_host else None
        try:
            self._run = wandb.init(
                project=keys.wandb_project,
                group=keys.wandb_group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=config.flat(),
                settings=settings,
                id=before.id if before else None,
                resume="allow" if before else None,
                allow_val_change=True if before else None,
            )
        except wandb.errors.Error as error:
            other = f", or delete {self._path} to begin another run there" if before else ""
            raise ConfigError([f"use_wandb: {error}; log in, or set WANDB_MODE=offline{other}"]) from error

    def report(self, step: int, figures: Figures) -> None:
        if step > self._given:
            self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)
            _write_run(self._path, _Logged(self._run.id, step))

    def note(self, step: int, message: str) -> None:
        """Weights & Biases keeps what is printed, and this is."""

    def close(self) -> None:
        self._run.finish()


def _read_run(path: Path) -> _Logged | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        return _Logged(str(content["id"]), int(content["step"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            [f"use_wandb: {path} does not name a run ({error}); delete it to begin another one"]
        ) from error


def _write_run(path: Path, run: _Logged) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(run._asdict()))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error}); complete checkpoints are intact") from error


def _keep_older(path: Path) -> None:
    """Move the lines of an older run to the first free of ``metrics.jsonl.1``, ``.2``, ..., or to the end of the last
    where none is free: a run that dies again and again before its first checkpoint leaves no file for every start.
    """
    if not path.stat().st_size:
        return  # it is replaced
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, OLDER_FILES + 1)]
    free = next((file for file in older if not file.exists()), None)
    if free is not None:
        path.replace(free)
        return
    with path.open("rb") as lines, older[-1].open("r+b") as last:
        if last.seek(0, os.SEEK_END):
            last.seek(-1, os.SEEK_END)
            if last.read(1) != b"\n":
                last.write(b"\n")  # a kill can leave half a line
        shutil.copyfileobj(lines, last)
        last.flush()
        os.fsync(last.fileno())
    path.unlink()


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a metrics file; of others there is a warning, but for half a line at the end, as a kill
    can leave it.
    """
    lines = []
    texts = path.read_text(errors="replace").split("\n") if path.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number < len(texts):
                logger.warning("%s: line %d cannot be read (%s) and is left out", path, number, error)
    return lines
