"""The file results.csv: all numbers of a report, with one row per label, seed, task, metric and length."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.report.document import csv_lines, from_spreadsheet
from megatron_coca.evaluation.report.plots.looks import Member
from megatron_coca.evaluation.report.reading import LoadedResult, ResultGroup
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.evaluation.tasks.speed.task import SPEED


@dataclass(frozen=True)
class TidyRow:
    """One number of one seed.

    `weights` is the label of the weights as trained, and `variant` the change at evaluation. `metric` names the
    number, such as `accuracy, beyond` or `accuracy, depth 50%`. `low` and `high` are the ends of the 95% interval of
    this seed, if there is one. `method` is the method that evaluation changes or, without a change, `pos_emb`.
    `trained` is the training length.
    """

    label: str
    weights: str
    variant: str
    seed: int | None
    task: str
    metric: str
    length: int | None
    value: float
    low: float | None = None
    high: float | None = None
    method: str = ""
    trained: int | None = None


COLUMNS = tuple(field.name for field in fields(TidyRow))
ResultGroups = Iterable[tuple[str, ResultGroup]]
"""Groups of comparable results with the name of their task."""


def tidy_rows(groups: ResultGroups, members: Mapping[str, Member]) -> list[TidyRow]:
    """Return the numbers of all groups. If a task has several groups, `task` in the rows includes their difference."""
    rows = []
    for task, group in groups:
        name = f"{task} ({group.differs})" if group.differs else task
        for series in group.series:
            member = members[series.label]
            for replicate in series.replicates:
                checkpoint = replicate.header.checkpoint
                of_seed = (member.label, member.base, member.variant, checkpoint.seed, name)
                found = (reading for entry in replicate.entries.values() for reading in TASKS[task].read(entry))
                rows += [TidyRow(*of_seed, *reading, member.method, checkpoint.seq_length) for reading in found]
    return rows


def speed_rows(loaded: Iterable[LoadedResult]) -> list[TidyRow]:
    """Return the times of `speed`. In these rows, `label` is the method, and `weights` describes the model's shape.

    Times of different files are never averaged. With several files, `task` therefore contains the file's number, label
    and device. The page's tables have the same number in their names.
    """
    files: list[Any] = [item.result for item in loaded if item.result.task == SPEED.name]
    rows = []
    for number, result in enumerate(files, 1):
        task = f"speed ({number}: {result.label} on {result.environment.device})" if len(files) > 1 else "speed"
        for entry in result.results:
            of_file = (entry.method, result.label, "", None, task)
            rows += [TidyRow(*of_file, *reading, entry.method) for reading in SPEED.read(entry)]
    return rows


def csv_text(rows: Iterable[TidyRow]) -> str:
    return csv_lines([COLUMNS, *(asdict(row).values() for row in rows)], digits=10)


def read_rows(path: str | Path) -> list[TidyRow]:
    """Read a file that `csv_text` wrote."""
    numbers = {"value": float, "low": float, "high": float, "seed": int, "length": int, "trained": int}
    rows = []
    with open(path, encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            known = {
                name: numbers[name](text) if name in numbers else from_spreadsheet(text)
                for name, text in line.items()
                if text
            }
            empty = {name: None if name in numbers else "" for name in COLUMNS}
            rows.append(TidyRow(**(empty | known)))
    return rows
