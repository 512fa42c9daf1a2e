"""Sinks for reported metrics: the console, metrics.jsonl, TensorBoard, Weights & Biases."""

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
"""Metrics by name. None means that the metric has no value at this step, such as the norm of a skipped step."""

UNSAVED = Path("runs/unsaved")
"""The folder for the metrics of a run without `log_dir` and `save`."""
METRICS, OLDER, OWNER = "metrics.jsonl", "metrics_older.jsonl", "metrics_run.json"
_LARGEST = 1 << 32
"""Maximum size in bytes of an existing metrics file that is read at the start."""
WANDB_RUN = "wandb.json"
WANDB_SECONDS = 30
"""Seconds to wait for the server at the start, and for the remaining data to be sent at the end."""


def run_folder(config: Config) -> Path:
    """Return the folder for a run's metrics: `log_dir`, else `save`, else `UNSAVED`."""
    return Path(config.logging.log_dir or config.checkpoint.save or UNSAVED)


def unsaved_folder(number: int) -> Path:
    """Return the metrics folder of the `number`-th simultaneous run (from 1) without `log_dir` and `save`."""
    return UNSAVED if number == 1 else UNSAVED.with_name(f"{UNSAVED.name}_{number}")


def _continues(folder: Path, run: str | None) -> bool:
    """Return whether the metrics in a folder belong to the run with this id: several runs may use the same `log_dir`
    one after the other.
    """
    if folder.parent == UNSAVED.parent and folder.name.startswith(UNSAVED.name):
        return False
    try:
        return run is None or json.loads(read_regular(folder / OWNER))["run"] == run
    except FileNotFoundError:  # the file is written after the first lines
        return True
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s: cannot be read (%s); the folder's metrics are set aside", folder / OWNER, error)
        return False


class Sink:
    """Receives metrics (`report`) and one-line messages (`note`), each with the number of completed steps."""

    def advance(self) -> None:
        """Count one completed step."""

    def report(self, step: int, figures: Figures) -> None:
        raise NotImplementedError

    def note(self, step: int, message: str) -> None:
        """Do nothing, because the console and Weights & Biases show the log anyway."""

    def close(self) -> None:
        raise NotImplementedError


def open_sinks(config: Config, start: int, run: str | None = None) -> list[Sink]:
    """Open all sinks of the run with the id `run`; `start` is the number of completed steps.

    Raises:
        ConfigError: a library is missing, a folder is not writable, or the login to Weights & Biases fails.
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
            if start and key != "log_dir":  # a resumed run must not stop because of this
                logger.warning("%s: %s; training continues without it, and %s has all metrics", key, error, METRICS)
                continue
            raise ConfigError(f"{key}: {error}; choose a writable folder") from error
    return [*opened, Console(config, start)]  # last, because the output of other sinks goes above its bar


PERPLEXITY = "validation_perplexity_"
"""Prefix of the perplexity metrics of `eval_windows`."""
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "validation_loss": ("validation loss", "{:.4f}".format),
    "grad_norm": ("grad norm", "{:.3g}".format),
    "lr": ("lr", "{:.3g}".format),
    "tokens_per_second": ("tokens/s", short),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_memory_gib": ("memory", "{:.2f}GiB".format),
}
"""Label and format of the metrics on the console, in this order. Files contain all metrics."""


def shown(figures: Figures) -> dict[str, str]:
    """Return the label and the text of each metric that the console shows."""
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
"""Metrics beside the progress bar. If there is not enough room, only the first ones are shown."""


class Console(Sink):
    """Shows progress on standard error. On a terminal, this is a bar, with one line above it for each validation. In
    other outputs, such as a job's log file, it is one line per report.
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
    """A sink that must not stop the training. Its first failure is logged as a warning; then it is not used again."""

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
        except Exception as error:  # each library has its own exceptions
            self._failed = True
            logger.warning(
                "%s: failed (%s); training continues without it, and %s has all metrics", self._key, error, METRICS
            )


class JsonLines(Sink):
    """Writes one line of JSON to `metrics.jsonl` for every report and for every note, which has its text as `event`.

    A resumed run drops the lines of steps that it will repeat, but does not repeat the notes of the step from which it
    resumes (such as the start of a stage). A new run moves the lines of older runs to `OLDER`. NaN and infinity, which
    JSON does not have, become null.
    """

    def __init__(self, folder: Path, start: int, run: str | None = None, may_fail: bool = False) -> None:
        """`run` is the id of the run. With `may_fail`, a full disk only delays the lines; otherwise it ends the run."""
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
        with contextlib.suppress(OSError):  # `report` has already raised an error or warned
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
                    f"{self._path}: cannot be written ({error}), but complete checkpoints are intact; free some space, "
                    "and resume with --auto-resume"
                ) from error
            if not self._warned:
                logger.warning(
                    "log_dir: %s: cannot be written (%s); new lines stay in memory until they can be written",
                    self._path,
                    error,
                )
                self._warned = True

    def _append(self) -> None:
        """Write the waiting lines. If this raises an OSError, the file still ends with a complete line."""
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
"""Prefixes of validation metrics. Every validation reports the first, but only a run's last validation the second."""


def is_validated(folder: Path, step: int, run: str) -> bool:
    """Return whether the metrics file in `folder` contains a validation at `step` of the run with the id `run`."""
    return _continues(folder, run) and any(
        line["step"] == step and any(map(_of_validation, line)) for line in _read_lines(folder / METRICS)
    )


def _of_validation(name: str) -> bool:
    return name.startswith(VALIDATED)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a metrics file. Invalid lines are logged, except an incomplete last line (left by a
    kill).
    """
    lines = []
    texts = read_regular(path, _LARGEST).decode(errors="replace").split("\n") if path.is_file() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if number < len(texts):
                logger.warning("%s: line %d cannot be read, and is dropped (%s)", path, number, error)
    return lines


def _keep_older(path: Path) -> None:
    """Append an older run's lines to `OLDER`; the last line may be incomplete if the run was killed."""
    text = path.read_bytes()
    if text:
        with open_to_append(path.with_name(OLDER)) as older:
            older.write(text if text.endswith(b"\n") else text + b"\n")
            older.flush()
            os.fsync(older.fileno())
    path.unlink()


class TensorBoard(Sink):
    """Writes metrics as scalars and notes as text, and hides what an earlier process wrote for repeated steps."""

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
    """Sends metrics to Weights & Biases. With WANDB_MODE=offline, or if the server does not answer, they stay on disk.

    `wandb.json` in the run's folder contains the run's id and its last step. A resumed run keeps the id, and does not
    send repeated steps again, because wandb cannot replace history.
    """

    def __init__(self, config: Config, folder: Path, start: int, resumed: bool) -> None:
        """`start` is the last step that the run has sent; `resumed` tells whether an earlier launch has trained."""
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
        except ValueError as error:  # from pydantic, which validates wandb's settings and variables
            reason = masked(" ".join(str(error).split()))[:300]
            raise ConfigError(
                f"use_wandb: wandb_host or a variable WANDB_* is invalid ({reason}); write addresses with https://"
            ) from error
        except (wandb.errors.Error, OSError) as error:
            # wandb has retried until `init_timeout`. An unreachable server (CommError, OSError) is not
            # a user error, and a resumed run must not stop because of wandb.
            if not (resumed or isinstance(error, wandb.errors.CommError | OSError)):
                raise ConfigError(
                    f"use_wandb: {error}; log in with `wandb login`, or set WANDB_MODE=offline"
                ) from error
            self._run = begin(mode="offline", settings=wandb.Settings(**host))
            logger.warning("use_wandb: %s; metrics stay on disk, so send them later with `%s`", error, self._sync())

    def report(self, step: int, figures: Figures) -> None:
        if step <= self._sent:
            return
        self._run.log({name: value for name, value in figures.items() if value is not None}, step=step)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Not durable, because this happens at every report.
        write_file(self._path, json.dumps({"id": self._run.id, "step": step}), durable=False)

    def close(self) -> None:
        finishing = threading.Thread(target=self._run.finish, name="wandb", daemon=True)
        finishing.start()
        finishing.join(WANDB_SECONDS)
        if finishing.is_alive():
            logger.warning("use_wandb: some metrics are not sent yet; send them later with `%s`", self._sync())

    def _sync(self) -> str:
        """Return the command that sends the metrics on disk."""
        return f"wandb sync {self._run.settings.sync_dir}"

    def _read(self) -> tuple[str, int]:
        try:
            content = json.loads(self._path.read_text())
            return str(content["id"]), int(content["step"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"use_wandb: {self._path} does not contain a run id ({error}); delete the file to start a new wandb run"
            ) from error
