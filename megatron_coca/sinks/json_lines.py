"""The file metrics.jsonl, which every run writes."""

import contextlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from megatron_coca.sinks.declaration import Metrics, MetricSink, RunFacts
from megatron_coca.support.atomic_write import write_file
from megatron_coca.support.errors import why_not_written
from megatron_coca.support.regular_files import open_to_append, read_regular

logger = logging.getLogger(__name__)

UNSAVED = Path("runs/unsaved")
"""The folder for the metrics of a run without `log_dir` and `save`."""
METRICS, OLDER, OWNER = "metrics.jsonl", "metrics_older.jsonl", "metrics_run.json"
_LARGEST = 1 << 32
"""Maximum size in bytes of an existing metrics file that is read at the start."""


def continues(folder: Path, run: str | None) -> bool:
    """Return whether the metrics in a folder belong to the run with this id. Several runs may use the same `log_dir`
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


class JsonLines(MetricSink):
    """Writes one line of JSON to `metrics.jsonl` for every report and for every note. The line of a note has its text
    as `event`.

    A resumed run drops the lines of steps that it will repeat, but does not repeat the notes of the step from which it
    resumes (such as the start of a stage). A new run moves the lines of older runs to `OLDER`. NaN and infinity, which
    JSON does not have, become null. If a line cannot be written, for example on a full disk, the run continues. The
    line is kept in memory and written together with the next line.
    """

    def __init__(self, run: RunFacts) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        path, start = run.folder / METRICS, run.known
        kept = [line for line in _read_lines(path) if line["step"] <= start] if start else []
        if path.is_file() and not start:
            _keep_older(path)
        write_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        if run.id is not None:
            write_file(run.folder / OWNER, json.dumps({"run": run.id}) + "\n")
        self._path, self._file = path, path.open("ab", buffering=0)
        self._waiting, self._warned = b"", False
        self._noted = [(line["step"], line["event"]) for line in kept if "event" in line]

    def report(self, step: int, metrics: Metrics) -> None:
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        self._write({"step": step} | finite)

    def note(self, step: int, message: str) -> None:
        if (step, message) not in self._noted:
            self._write({"step": step, "event": message})

    def close(self) -> None:
        try:
            self._append()
        except OSError as error:
            lost = self._waiting.count(b"\n")
            logger.warning("log_dir: %s: %d lines are lost (%s)", self._path, lost, error.strerror)
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            self._append()
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "log_dir: %s: %s; training continues, and new lines stay in memory until they can be written",
                    self._path,
                    why_not_written(error, "wait until the problem is solved"),
                )
                self._warned = True

    def _append(self) -> None:
        """Write the waiting lines. If this raises an OSError, the file still ends with a complete line."""
        if not os.fstat(self._file.fileno()).st_nlink:  # the file was deleted
            self._path.parent.mkdir(parents=True, exist_ok=True)
            again = self._path.open("ab", buffering=0)  # if this fails, the next line finds the old file still open
            self._file.close()
            self._file = again
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
    return continues(folder, run) and any(
        line["step"] == step and any(map(_of_validation, line)) for line in _read_lines(folder / METRICS)
    )


def _of_validation(name: str) -> bool:
    return name.startswith(VALIDATED)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of a metrics file. Invalid lines are logged. An incomplete last line is not, because a
    killed process leaves one.
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
    """Append an older run's lines to `OLDER`. If that run was killed, its last line may be incomplete."""
    text = path.read_bytes()
    if text:
        with open_to_append(path.with_name(OLDER)) as older:
            older.write(text if text.endswith(b"\n") else text + b"\n")
            older.flush()
            os.fsync(older.fileno())
    path.unlink()
