"""Show the state of runs: step, remaining time, newest checkpoint, and restarts with their reasons.

    megatron-coca status runs/*

The command only reads, so it can be used while a run trains, on any host that sees the folder.
"""

import json
import os
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.native.read import LOCK, MANIFEST, is_step_folder, step_folder, steps
from megatron_coca.commands import command_parser
from megatron_coca.support.console import duration
from megatron_coca.support.errors import InputError
from megatron_coca.support.markdown_tables import format_table, in_cell
from megatron_coca.support.plain_text import plain
from megatron_coca.support.regular_files import open_regular
from megatron_coca.training.launches import END, LAUNCHES, START, read_launches
from megatron_coca.work.locks import is_locked
from megatron_coca.work.statuses import DONE

METRICS = "metrics.jsonl"
TAIL = 1 << 18
"""Number of bytes that are read at the end of the metrics file. A line has a few hundred bytes."""
WIDEST = 60
"""Maximum number of characters of a state in the table. A longer state is printed in full below the table."""
HEADER = ("run", "state", "step", "ETA", "last checkpoint", "restarts")


class StatusRow(NamedTuple):
    """One line of the table, the number of restarts for each reason, and the whole state if the table shortens it."""

    texts: tuple[str, ...]
    reasons: dict[str, int]
    state: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Raises InputError if no folder contains a run."""
    folders = parser().parse_args(arguments).folders
    rows = {folder: row(folder) for folder in runs_among(folders)}
    if not rows:
        raise InputError(
            f"{', '.join(map(str, folders))}: no run; give folders with {METRICS} or checkpoints, such as runs/*"
        )
    print(format_table(HEADER, [each.texts for each in rows.values()]))
    for folder, each in rows.items():
        for reason, number in each.reasons.items():
            print(f"{folder}: {number} x {plain(in_cell(reason))}")
        if each.state is not None:
            print(f"{folder}: {plain(in_cell(each.state))}")
    return 0


def parser() -> ArgumentParser:
    parser = command_parser("status", __doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folders of runs (`log_dir` or `save`)")
    return parser


def runs_among(folders: Sequence[Path]) -> list[Path]:
    """Return one folder for each run, in order. If a run has both `log_dir` and `save`, this is its `log_dir`."""
    given = {folder: folder.parent if is_step_folder(folder) else folder for folder in folders}
    runs = {folder.resolve(): folder for folder in reversed(given.values()) if is_run(folder)}
    saves = {place: saved_in(folder, launches_of(folder)).resolve() for place, folder in runs.items()}
    elsewhere = {save for place, save in saves.items() if save != place}
    return [folder for place, folder in reversed(runs.items()) if place not in elsewhere]


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn an OSError into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error}); check the folder's permissions") from error


def launches_of(folder: Path) -> list[dict[str, Any]]:
    """Return the launches of a run. Raises InputError."""
    with readable(folder):
        return read_launches(folder)


def saved_in(folder: Path, launches: Sequence[Mapping[str, Any]]) -> Path:
    """Return the folder with the checkpoints of a run, which its last launch names."""
    save = next((line.get("save") for line in reversed(launches) if line["event"] == START), None)
    return Path(save) if isinstance(save, str) else folder


def is_run(folder: Path) -> bool:
    """Return whether a folder contains launches, metrics or a complete checkpoint."""
    if not folder.is_dir():
        return False
    return any((folder / name).is_file() for name in (LAUNCHES, METRICS)) or bool(steps(folder))


def row(folder: Path) -> StatusRow:
    """Describe one run. Raises InputError if one of its files cannot be read."""
    launches = launches_of(folder)
    with readable(folder):
        metrics = last_metrics(folder)
    starts = [line for line in launches if line["event"] == START]
    start = starts[-1] if starts else {}
    save = saved_in(folder, launches)
    state, known = state_of(folder, save, launches, start.get("last")), int(metrics.get("step", 0))
    reported = [known] if metrics else []
    step = max([*reported, *([int(start["step"])] if isinstance(start.get("step"), int) else [])], default=None)
    last = start.get("last")
    remaining = metrics.get("eta_seconds")
    if state == "running" and isinstance(remaining, int | float):
        age = time.time() - (folder / METRICS).stat().st_mtime
        eta = duration(max(0.0, remaining - age))
    else:
        eta = "-"
    restarts = [str(line.get("why")) for line in starts[1:]]
    is_long = len(state) > WIDEST
    texts = (
        str(folder),
        f"{state[: WIDEST - 3]}..." if is_long else state,
        "-" if step is None else f"{step:,}" + (f" of {last:,}" if isinstance(last, int) else ""),
        eta,
        newest_checkpoint(save),
        str(len(restarts)),
    )
    reasons = {reason: restarts.count(reason) for reason in dict.fromkeys(restarts)}
    return StatusRow(texts, reasons, state if is_long else None)


def state_of(folder: Path, save: Path, launches: Sequence[Mapping[str, Any]], steps_of_run: object) -> str:
    """Return the state in a few words: running, finished, or why the last launch ended.

    A run that was killed after its last step's checkpoint is finished too, because the next start has nothing to do.
    """
    if is_locked(folder / LOCK):
        return "running"
    if not launches:
        return "not running"
    last = launches[-1]
    if last["event"] == END:
        return "finished" if last.get("status") == DONE else f"ended: {last.get('why')}"
    with suppress(CheckpointError):
        if isinstance(steps_of_run, int) and steps_of_run in steps(save):
            return "finished"
    return "killed" if last["event"] == START else f"{last['event']}: {last.get('why')}"


def last_metrics(folder: Path) -> dict[str, Any]:
    """Return the newest value of each metric in the file. Lines are merged, because validation lines have no ETA."""
    try:
        with open_regular(folder / METRICS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            texts = file.read(TAIL).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    values: dict[str, Any] = {}
    for text in texts:
        with suppress(ValueError, RecursionError):  # the first or the last line may be incomplete
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                values |= line
    return values


def newest_checkpoint(save: Path) -> str:
    """Return the step and the age of the newest complete checkpoint."""
    try:
        complete = steps(save)
        if not complete:
            return "-"
        written = (step_folder(save, complete[-1]) / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError):
        return "cannot be read"
    return f"step {complete[-1]:,}, {duration(max(0.0, time.time() - written))} ago"
