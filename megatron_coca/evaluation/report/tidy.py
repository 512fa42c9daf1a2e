"""The numbers of a report in one tidy table: a row for every label, seed, task, metric and length (results.csv)."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_coca.evaluation.report.document import from_spreadsheet, in_spreadsheet
from megatron_coca.evaluation.report.looks import Member
from megatron_coca.evaluation.report.reading import LoadedResult, ResultGroup


@dataclass(frozen=True)
class Row:
    """One number of one seed.

    `weights` is the label of the weights as trained, and `variant` the change at evaluation. `metric` says which
    part of the task is measured, such as `accuracy, beyond` or `accuracy, depth 50%`. `low` and `high` are the ends of
    the 95% interval of this seed, if there is one. `method` is the name of the variant's method in a configuration, and
    `trained` the training length.
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


COLUMNS = tuple(field.name for field in fields(Row))
Number = tuple[str, int | None, float, float | None, float | None]
"""Metric, length, value, and the ends of its interval."""


Groups = Iterable[tuple[str, ResultGroup]]
"""Groups of comparable results with the name of their task."""


def tidy_rows(groups: Groups, members: Mapping[str, Member]) -> list[Row]:
    """Return the complete numbers of all groups. A task with several groups has their difference in its name."""
    rows = []
    for task, group in groups:
        name = f"{task} ({group.differs})" if group.differs else task
        for series in group.series:
            member = members[series.label]
            for replicate in series.replicates:
                checkpoint = replicate.header.checkpoint
                of_seed = (member.label, member.base, member.variant, checkpoint.seed, name)
                numbers = (number for entry in replicate.entries.values() for number in _numbers(task, entry))
                rows += [Row(*of_seed, *number, member.method, checkpoint.seq_length) for number in numbers]
    return rows


def speed_rows(loaded: Iterable[LoadedResult]) -> list[Row]:
    """Return the times of `speed`: the label is the method, and the weights are the shape of the model.

    Times of different files are never averaged: with several files, the task's name has the file's number, as in the
    page's tables, with its label and device.
    """
    files: list[Any] = [item.result for item in loaded if item.result.task == "speed"]
    rows = []
    for number, result in enumerate(files, 1):
        task = f"speed ({number}: {result.label} on {result.environment.device})" if len(files) > 1 else "speed"
        for entry in result.results:
            of_file = (entry.method, result.label, "", None, task, f"{entry.what}, seconds")
            rows.append(Row(*of_file, entry.length, entry.seconds, method=entry.method))
    return rows


def _numbers(task: str, entry: Any) -> Iterator[Number]:
    if task == "perplexity":
        yield "perplexity", entry.window, entry.perplexity, None, None
        yield "loss", entry.window, entry.nll, None, None
        yield "next-token accuracy", entry.window, entry.accuracy, None, None
    elif task == "longppl":
        yield "LongPPL", entry.length, entry.longppl, None, None
        yield "perplexity", entry.length, entry.perplexity, None, None
        yield "share of key tokens", entry.length, entry.key_tokens / entry.tokens_scored, None, None
    elif task == "lm-eval":
        for part in entry.by_length:
            whole = part.length.isdecimal()
            name = f"{entry.task} score" if whole else f"{entry.task} score, {part.length}"
            yield name, int(part.length) if whole else None, part.value, None, None
        for score in entry.scores:
            if score.value is not None:
                name = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
                yield f"{entry.task} {name}", None, score.value, None, None
    elif task == "analyse":
        shares = {} if entry.angles is None else {"anomalous pairs": entry.angles.anomalous}
        shares |= {"score falls with distance": entry.decay.falling_mean, "entropy": entry.entropy.mean}
        yield from ((name, entry.length, value, None, None) for name, value in shares.items() if value is not None)
    else:
        yield from _accuracies(entry)


def _accuracies(entry: Any) -> Iterator[Number]:
    """Yield the accuracies of a retrieval entry: of all cases, and of cases inside and beyond the training length."""
    apart = [entry.task] if hasattr(entry, "task") else []
    apart += [f"depth {entry.depth}%"] if hasattr(entry, "depth") else []
    apart += [f"shift {entry.shift}"] if getattr(entry, "shift", 0) else []
    parts = {"": entry, "inside": getattr(entry, "inside", None), "beyond": getattr(entry, "beyond", None)}
    for side, tally in parts.items():
        if tally is not None:
            name = ", ".join(["accuracy", *apart, *filter(None, [side])])
            yield name, entry.length, tally.accuracy, getattr(tally, "low", None), getattr(tally, "high", None)


def csv_text(rows: Iterable[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_shown(value) for value in asdict(row).values()])
    return text.getvalue()


def _shown(value: str | float | None) -> str:
    if isinstance(value, str):
        return in_spreadsheet(value)
    return "" if value is None else f"{value:.10g}"


def read_rows(path: str | Path) -> list[Row]:
    """Read a file that `csv_text` wrote."""
    numbers = {"value": float, "low": float, "high": float, "seed": int, "length": int, "trained": int}
    rows = []
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            known = {
                name: numbers[name](text) if name in numbers else from_spreadsheet(text)
                for name, text in line.items()
                if text
            }
            empty = {name: None if name in numbers else "" for name in COLUMNS}
            rows.append(Row(**(empty | known)))
    return rows
