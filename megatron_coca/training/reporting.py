"""Where a run's figures go: a progress bar, a JSON line per report, and TensorBoard or Weights & Biases where asked
for.
"""

import contextlib
import json
import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import Config, ConfigError

METRICS = "metrics.jsonl"


class Reporter(Protocol):
    """Takes the figures of a step."""

    def report(self, step: int, figures: dict[str, float | None]) -> None:
        """`step` is the number of completed iterations."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class Console:
    """A progress bar with rate and remaining time, on standard error."""

    def __init__(self, config: Config, start: int) -> None:
        self._bar = tqdm(
            total=config.schedule.train_iters, initial=start, desc=config.position.pos_emb, unit="step", mininterval=1.0
        )

    def advance(self) -> None:
        """One step is done."""
        self._bar.update()

    def report(self, step: int, figures: dict[str, float | None]) -> None:
        shown = {name: f"{value:.4g}" for name, value in figures.items() if value is not None}
        self._bar.set_postfix(shown, refresh=False)

    def close(self) -> None:
        self._bar.close()


class JsonLines:
    """One JSON object per report in `metrics.jsonl`.

    A resumed run first drops the lines of steps that it will repeat; a fresh one sets an older file aside.
    """

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        kept = [line for line in _lines(path) if line["step"] <= start] if start else []
        if path.is_file() and not start:
            path.replace(next(old for number in count(1) if not (old := folder / f"{METRICS}.{number}").exists()))
        aside = folder / f".{METRICS}.partial"
        aside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        aside.replace(path)
        self._path, self._file = path, path.open("a")

    def report(self, step: int, figures: dict[str, float | None]) -> None:
        try:
            self._file.write(json.dumps({"step": step, **figures}) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written ({error}); complete checkpoints are intact"
            ) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `report` has told of a full disk already
            self._file.close()


class TensorBoard:
    """Scalars for TensorBoard."""

    def __init__(self, folder: str, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra: imported only where it is asked for

        self._writer = SummaryWriter(folder, purge_step=start + 1)

    def report(self, step: int, figures: dict[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run at Weights & Biases; WANDB_MODE=offline keeps it on disk."""

    def __init__(self, config: Config) -> None:
        import wandb  # an extra: imported only where it is asked for

        keys = config.logging
        settings = wandb.Settings(base_url=keys.wandb_host) if keys.wandb_host else None
        try:
            self._run = wandb.init(
                project=keys.wandb_project,
                group=keys.wandb_group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=config.flat(),
                settings=settings,
            )
        except wandb.errors.Error as error:
            raise ConfigError([f"use_wandb: {error}; log in, or set WANDB_MODE=offline"]) from error

    def report(self, step: int, figures: dict[str, float | None]) -> None:
        self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


class Reporters:
    """All sinks of one run; does nothing on ranks other than the first."""

    def __init__(self, config: Config, start: int, active: bool) -> None:
        keys = config.logging
        folder = keys.log_dir or config.checkpoint.save
        self._console = Console(config, start) if active else None
        self._sinks: list[Reporter] = [self._console] if self._console else []
        if active and folder is not None:
            self._sinks.append(JsonLines(Path(folder), start))
        if active and keys.tensorboard_dir is not None:
            folder_name = keys.tensorboard_dir
            self._sinks.append(_extra("tensorboard_dir", lambda: TensorBoard(folder_name, start)))
        if active and keys.use_wandb:
            self._sinks.append(_extra("use_wandb", lambda: WandB(config)))

    def advance(self) -> None:
        """One step is done."""
        if self._console:
            self._console.advance()

    def report(self, step: int, **figures: float | None) -> None:
        """Hand the figures of `step` to every sink."""
        for sink in self._sinks:
            sink.report(step, figures)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def set_up_logging(active: bool) -> None:
    """Messages of this package on standard error, from the first rank only."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("megatron_coca").setLevel(logging.INFO if active else logging.WARNING)


def _extra(key: str, build: Callable[[], Reporter]) -> Reporter:
    try:
        return build()
    except ImportError as error:
        raise ConfigError([f"{key}: {error}; install the extra: pip install 'megatron-coca[logging]'"]) from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a kill can leave half a line at its end."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError):
            break
    return lines
