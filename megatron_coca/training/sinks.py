"""Sinks of reported figures: the console, metrics.jsonl, TensorBoard, Weights & Biases."""

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import Config, ConfigError
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.console import Progress, duration, on_terminal, short, write
from megatron_coca.support.plain_text import masked
from megatron_coca.support.regular_files import open_to_append, read_regular

logger = logging.getLogger(__name__)

Figures = Mapping[str, float | None]
"""Values by name. None is a value that does not exist at this step, such as the norm of a skipped one."""

UNSAVED = Path("runs/unsaved")
"""The folder for the figures of a run without `log_dir` and `save`."""
METRICS, OLDER, OWNER = "metrics.jsonl", "metrics_older.jsonl", "metrics_run.json"
_LARGEST = 1 << 32
"""Maximum bytes of metrics that are read at the start."""
WANDB_RUN = "wandb.json"
WANDB_SECONDS = 30
"""Seconds to wait for the server at the start, and for the rest to be sent at the end."""


def run_folder(config: Config) -> Path:
    """The folder for the figures of a run: `log_dir`, else `save`, else `UNSAVED`."""
    return Path(config.logging.log_dir or config.checkpoint.save or UNSAVED)


def unsaved_folder(number: int) -> Path:
    """The folder for the figures of simultaneous runs without `log_dir` and `save`; `number` counts them from 1."""
    return UNSAVED if number == 1 else UNSAVED.with_name(f"{UNSAVED.name}_{number}")


def _continues(folder: Path, run: str | None) -> bool:
    """Return whether the lines in a folder are of the run with this id: runs may use one `log_dir` in turn."""
    if folder.parent == UNSAVED.parent and folder.name.startswith(UNSAVED.name):
        return False
    try:
        return run is None or json.loads(read_regular(folder / OWNER))["run"] == run
    except FileNotFoundError:  # it is written after the first lines
        return True
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s: cannot be read (%s); the lines beside it are set aside", folder / OWNER, error)
        return False


class Sink:
    """Takes figures (`report`) and one-line messages (`note`) with the number of completed steps."""

    def advance(self) -> None:
        """Count one completed step."""

    def report(self, step: int, figures: Figures) -> None:
        raise NotImplementedError

    def note(self, step: int, message: str) -> None:
        """Do nothing: the console and Weights & Biases show the log anyway."""

    def close(self) -> None:
        raise NotImplementedError


def open_sinks(config: Config, start: int, run: str | None = None) -> list[Sink]:
    """Open all sinks of the run with the id `run`; `start` is the number of completed steps.

    Raises:
        ConfigError: a library is missing, a folder cannot be written, or Weights & Biases does not know the user.
    """
    keys, folder = config.logging, run_folder(config)
    known, saved = start if _continues(folder, run) else 0, config.checkpoint.save
    may_fail = saved is not None and folder != Path(saved)
    opened: list[Sink] = []
    for key, wanted, build in (
        ("log_dir", True, lambda: JsonLines(folder, known, run, may_fail)),
        ("tensorboard_dir", keys.tensorboard_dir, lambda: TensorBoard(str(keys.tensorboard_dir), start)),
        ("use_wandb", keys.use_wandb, lambda: WandB(config, folder, known, start > 0)),
    ):
        if not wanted:
            continue
        try:
            sink: Sink = build()
            opened.append(sink if key == "log_dir" else Unneeded(sink, key))
        except ImportError as error:
            raise ConfigError(f"{key}: {error}; install the extra: pip install 'megatron-coca[logging]'") from error
        except OSError as error:
            if start and key != "log_dir":  # a resumed run must not stop for it
                logger.warning("%s: %s; training continues without it, and %s has all figures", key, error, METRICS)
                continue
            raise ConfigError(f"{key}: {error}; needs a writable folder") from error
    return [*opened, Console(config, start)]  # last, because the lines of the others go above its bar


PERPLEXITY = "validation_perplexity_"
"""Prefix of the perplexities of `eval_windows`."""
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "validation_loss": ("validation loss", "{:.4f}".format),
    "grad_norm": ("grad norm", "{:.3g}".format),
    "lr": ("lr", "{:.3g}".format),
    "tokens_per_second": ("tokens/s", short),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_memory_gib": ("memory", "{:.2f}GiB".format),
}
"""Label and format of the figures on the console, in this order; files have all figures."""


def shown(figures: Figures) -> dict[str, str]:
    """Return label and text of the figures that the console shows."""
    values = {name: figures.get(name) for name in COLUMNS}
    texts = {COLUMNS[name][0]: COLUMNS[name][1](value) for name, value in values.items() if value is not None}
    windows = {name: value for name, value in figures.items() if name.startswith(PERPLEXITY) and value is not None}
    return texts | {f"perplexity {name.removeprefix(PERPLEXITY)}": f"{value:.2f}" for name, value in windows.items()}


BAR: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "validation_loss": "val {:.4f}".format,
    "tokens_per_second": lambda rate: f"{short(rate)} tok/s",
    "peak_memory_gib": "{:.3g}GiB".format,
    "lr": "lr {:.3g}".format,
    "grad_norm": "grad {:.3g}".format,
}
"""Figures beside the bar of a terminal; the first ones if there is no room for all."""


class Console(Sink):
    """Progress on standard error. A terminal shows a bar, and a line above it for each validation. Elsewhere, such as
    in a job's log file, there is a line for each report.
    """

    def __init__(self, config: Config, start: int) -> None:
        self._total, self._name = config.schedule.train_iters, config.position.pos_emb
        self._latest: dict[str, float] = {}
        self._terminal = on_terminal()
        self._bar = Progress("", self._total, done=start, show=self._terminal)
        self._bar.__enter__()

    def advance(self) -> None:
        self._bar.advance()

    def report(self, step: int, figures: Figures) -> None:
        prefix = "validation_loss/"
        self._latest |= {name: value for name, value in figures.items() if value is not None}
        self._bar.details = [text(self._latest[name]) for name, text in BAR.items() if name in self._latest]
        texts = [f"{label} {text}" for label, text in shown(figures).items()]
        texts += [
            f"{name.removeprefix(prefix)} {value:.4f}"
            for name, value in figures.items()
            if name.startswith(prefix) and value is not None
        ]
        if (remaining := figures.get("eta_seconds")) is not None:
            self._bar.remaining(remaining)
            texts.append(f"ETA {duration(remaining)}")
        if texts and (not self._terminal or figures.get("validation_loss") is not None):
            write(f"{self._name} step {step}/{self._total}: {', '.join(texts)}")

    def close(self) -> None:
        self._bar.__exit__()


class Unneeded(Sink):
    """A sink that must not end the training: its first failure is logged as a warning, and it is not used again."""

    def __init__(self, sink: Sink, key: str) -> None:
        self._sink, self._key, self._failed = sink, key, False

    def report(self, step: int, figures: Figures) -> None:
        self._attempt(lambda: self._sink.report(step, figures))

    def note(self, step: int, message: str) -> None:
        self._attempt(lambda: self._sink.note(step, message))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as error:  # each library has its own
            self._failed = True
            logger.warning(
                "%s: failed (%s); training continues without it, and %s has all figures", self._key, error, METRICS
            )


class JsonLines(Sink):
    """One JSON object per report in `metrics.jsonl`; a note is one with its text as `event`.

    A resumed run drops the lines of steps that it will repeat. It does not repeat notes of the step that it resumes
    from, such as the start of a stage. A fresh run moves the lines of older runs to `OLDER`. NaN and infinity, which
    JSON lacks, become null.
    """

    def __init__(self, folder: Path, start: int, run: str | None = None, may_fail: bool = False) -> None:
        """`run` is the id of the run. With `may_fail` a full disk delays the lines, else it ends the run."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        kept = [line for line in _read_lines(path) if line["step"] <= start] if start else []
        if path.is_file() and not start:
            _keep_older(path)
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        if run is not None:
            write_file(folder / OWNER, json.dumps({"run": run}) + "\n")
        self._path, self._file, self._may_fail = path, path.open("ab", buffering=0), may_fail
        self._waiting, self._warned = b"", False
        self._noted = [(line["step"], line["event"]) for line in kept if "event" in line]

    def report(self, step: int, figures: Figures) -> None:
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in figures.items()}
        self._write({"step": step} | finite)

    def note(self, step: int, message: str) -> None:
        if (step, message) not in self._noted:
            self._write({"step": step, "event": message})

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `report` has raised for a full disk already, or warned
            self._append()
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            self._append()
        except OSError as error:
            if not self._may_fail:
                self._waiting = b""
                raise CheckpointError(
                    f"{self._path}: cannot be written ({error}); complete checkpoints are intact: free some space, and "
                    "resume with --auto-resume"
                ) from error
            if not self._warned:
                logger.warning(
                    "log_dir: %s: cannot be written (%s); its lines are kept until they can be written",
                    self._path,
                    error,
                )
                self._warned = True

    def _append(self) -> None:
        """Write the lines that wait. Raises OSError; the file then ends with a whole line."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            left = self._waiting
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._waiting = b""


VALIDATED = ("validation_loss", "share/")
"""Prefixes of the figures of a validation. Every validation has the first, the last one of a run the second."""


def is_validated(folder: Path, step: int, run: str) -> bool:
    """Return whether the metrics file in a folder has the validation of this step of the run with this id."""
    return _continues(folder, run) and any(
        line["step"] == step and any(map(_of_validation, line)) for line in _read_lines(folder / METRICS)
    )


def _of_validation(name: str) -> bool:
    return name.startswith(VALIDATED)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a metrics file. Invalid ones are logged, except half a line that a kill left."""
    lines = []
    texts = read_regular(path, _LARGEST).decode(errors="replace").split("\n") if path.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number < len(texts):
                logger.warning("%s: line %d cannot be read (%s) and is dropped", path, number, error)
    return lines


def _keep_older(path: Path) -> None:
    """Append an older run's lines to `OLDER`; the last one may be half a line that a kill left."""
    text = path.read_bytes()
    if text:
        with open_to_append(path.with_name(OLDER)) as older:
            older.write(text if text.endswith(b"\n") else text + b"\n")
            older.flush()
            os.fsync(older.fileno())
    path.unlink()


class TensorBoard(Sink):
    """Scalars, and notes as text. Hides the figures that an earlier process wrote for repeated steps."""

    def __init__(self, folder: str, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self._writer = SummaryWriter(folder, purge_step=start + 1)

    def report(self, step: int, figures: Figures) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def note(self, step: int, message: str) -> None:
        self._writer.add_text("event", message, step)

    def close(self) -> None:
        self._writer.close()


class WandB(Sink):
    """A run at Weights & Biases. WANDB_MODE=offline keeps it on disk, as does a server that does not answer.

    `wandb.json` in the run's folder keeps the run's id and its last step. A resumed run keeps the id, and does not send
    repeated steps again: wandb cannot replace history.
    """

    def __init__(self, config: Config, folder: Path, start: int, resumed: bool) -> None:
        """`start` is the last step that the run has sent; `resumed` is True if an earlier launch has trained."""
        import wandb  # optional dependency

        keys = config.logging
        self._path = folder / WANDB_RUN
        run_id, self._sent = self._read() if start and self._path.is_file() else (None, 0)
        host: dict[str, Any] = {"base_url": keys.wandb_host} if keys.wandb_host else {}
        begin = partial(
            wandb.init,
            project=keys.wandb_project,
            group=keys.wandb_group,
            name=keys.wandb_run_name,
            entity=keys.wandb_team,
            config=json.loads(masked(json.dumps(config.flat()))),
            id=run_id,
            resume="allow" if run_id else None,
            allow_val_change=True if run_id else None,
        )
        try:
            self._run = begin(settings=wandb.Settings(init_timeout=WANDB_SECONDS, **host))
        except ValueError as error:  # from pydantic, which checks the library's settings and variables
            reason = masked(" ".join(str(error).split()))[:300]
            raise ConfigError(
                f"use_wandb: wandb_host or a variable WANDB_* is not valid ({reason}); write addresses with https://"
            ) from error
        except wandb.errors.Error as error:
            # An unreachable server is not the user's mistake, and a resumed run must not stop for it.
            if not (resumed or isinstance(error, wandb.errors.CommError)):
                raise ConfigError(
                    f"use_wandb: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
                ) from error
            self._run = begin(mode="offline", settings=wandb.Settings(**host))
            logger.warning("use_wandb: %s; this launch is kept on disk: send it later with `%s`", error, self._sync())

    def report(self, step: int, figures: Figures) -> None:
        if step <= self._sent:
            return
        self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._path, json.dumps({"id": self._run.id, "step": step}), durable=False)  # at every report

    def close(self) -> None:
        finishing = threading.Thread(target=self._run.finish, name="wandb", daemon=True)
        finishing.start()
        finishing.join(WANDB_SECONDS)
        if finishing.is_alive():
            logger.warning("use_wandb: not everything is sent yet; send the rest later with `%s`", self._sync())

    def _sync(self) -> str:
        """Return the command that sends the data on disk."""
        return f"wandb sync {self._run.settings.sync_dir}"

    def _read(self) -> tuple[str, int]:
        try:
            content = json.loads(self._path.read_text())
            return str(content["id"]), int(content["step"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"use_wandb: {self._path} does not name a run ({error}); delete it to start another one"
            ) from error
