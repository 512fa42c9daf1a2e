"""Reading result files, and grouping results that measure the same thing."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_coca.evaluation import results
from megatron_coca.evaluation.analysis.records import AnalysisResult
from megatron_coca.evaluation.harness.records import HarnessResult
from megatron_coca.evaluation.perplexity import PerplexityResult
from megatron_coca.evaluation.results import Cell, Cost, EvaluationError, Missing, Result
from megatron_coca.evaluation.retrieval.records import NeedleResult, PasskeyResult, RulerResult
from megatron_coca.evaluation.speed.measuring import SpeedResult

logger = logging.getLogger(__name__)

RESULT_TYPES: dict[str, type[Result]] = {
    "perplexity": PerplexityResult,
    "passkey": PasskeyResult,
    "needle": NeedleResult,
    "ruler": RulerResult,
    "lm-eval": HarnessResult,
    "analyse": AnalysisResult,
    "speed": SpeedResult,
}
"""The type of a result file by its field `task`."""

REPORT_FILE = "report.json"
REMEDY = "measure it again, or remove the file"
MAX_NAMED = 5
"""Ignored files that a warning names."""


@dataclass(frozen=True)
class LoadedResult:
    """A result file and the costs of its cells."""

    file: str
    result: Result
    costs: tuple[Cost, ...] = ()


def read_results(paths: Sequence[str | Path]) -> list[LoadedResult]:
    """Reads files and folders with everything below them; each file once, in folders sorted by name.

    A result without a label gets the name of its checkpoint's folder. Other JSON files in a folder are named in a
    warning. Raises EvaluationError for a named file that is not a result, for a damaged one, and if there is none.
    """
    loaded: dict[Path, LoadedResult] = {}
    for path in map(Path, paths):
        ignored = []
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
            if path.is_dir() and (hidden or file.name.endswith(results.SUFFIX) or file.name == REPORT_FILE):
                continue
            task = _task(file)
            if task is not None:
                loaded.setdefault(file.resolve(), _load(file, task))
            elif path.is_dir():
                ignored.append(str(file))
            else:
                tasks = ", ".join(RESULT_TYPES)
                raise EvaluationError(f"{file}: is not a result of `evaluate.py` (its task is none of {tasks})")
        if ignored:
            more = f" and {len(ignored) - MAX_NAMED} more" if len(ignored) > MAX_NAMED else ""
            logger.warning("ignored, not result files: %s%s", ", ".join(ignored[:MAX_NAMED]), more)
    if not loaded:
        raise EvaluationError("no results to report: name files of `evaluate.py TASK --output`, or folders of them")
    return list(loaded.values())


def _task(file: Path) -> str | None:
    """The field `task` if it is a known one. Raises EvaluationError for a file that is not readable JSON: a truncated
    result does not show its task.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{file}: is damaged: not JSON ({error}); {REMEDY}") from error
    task = content.get("task") if isinstance(content, dict) else None
    return task if isinstance(task, str) and task in RESULT_TYPES else None


def _load(file: Path, task: str) -> LoadedResult:
    try:
        result = results.read_record(file, RESULT_TYPES[task], f"a result of `evaluate.py {task}`")
    except EvaluationError as error:
        raise EvaluationError(f"{error}; {REMEDY}") from error
    if not result.label.strip():
        checkpoint = result.checkpoint.path
        result = result.model_copy(update={"label": Path(checkpoint).name or checkpoint})
    costs = results.read_costs(file)
    return LoadedResult(str(file), result, tuple(costs.costs) if costs is not None else ())


Comparable = Mapping[str, str]
"""Properties in which results of one table agree: its name in headings, and the attribute path in a result."""

_LENGTH = re.compile(r"\b(?:window|length) (\d+)")
"""A length in the `at` of a missing cell."""
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
MAX_HEADING_VALUE = 100
"""Characters of a value in the heading of a group."""


@dataclass(frozen=True)
class Series:
    """All results of one label in a group, from one or several files; `header` is the first file's result."""

    label: str
    header: Any
    cells: dict[tuple[Any, ...], Any]
    missing: dict[str, Missing]

    def why(self, at: str) -> Missing:
        unknown = Missing(at=at, kind="not run", reason="")
        return self.missing.get(at) or self.missing.get("all") or unknown


@dataclass(frozen=True)
class ResultGroup:
    """Comparable series; `differs` says how this group differs from the other groups of its task."""

    series: tuple[Series, ...]
    differs: str = ""

    @property
    def first(self) -> Any:
        return self.series[0].header

    @property
    def heading(self) -> str:
        return f"Results with {self.differs}" if self.differs else ""

    @property
    def measured(self) -> list[Series]:
        return [series for series in self.series if series.cells]

    def cell_keys(self) -> list[Any]:
        return sorted({key for series in self.series for key in series.cells})

    def lengths(self) -> list[int]:
        missing = [_LENGTH.search(at) for series in self.series for at in series.missing]
        measured = {next(part for part in key if isinstance(part, int)) for key in self.cell_keys()}
        return sorted(measured | {int(match[1]) for match in missing if match})

    def training_lengths(self) -> set[int]:
        return {series.header.checkpoint.seq_length for series in self.series}


def group_results(loaded: Sequence[LoadedResult], comparable: Comparable) -> list[ResultGroup]:
    """Groups comparable results, in the order of the files.

    Raises EvaluationError where one label of a group names two models, or two values of one cell.
    """
    values: dict[str, Callable[[Result], Any]] = {name: attrgetter(path) for name, path in comparable.items()}
    members: dict[str, list[LoadedResult]] = {}
    for item in loaded:
        members.setdefault(repr([value(item.result) for value in values.values()]), []).append(item)
    firsts = [items[0].result for items in members.values()]
    differing = [name for name, value in values.items() if len({repr(value(first)) for first in firsts}) > 1]
    found = []
    for items in members.values():
        by_label: dict[str, list[LoadedResult]] = {}
        for item in items:
            by_label.setdefault(item.result.label, []).append(item)
        shown = [(name, _HASH.sub(r"\1", str(values[name](items[0].result)))) for name in differing]
        differs = ", ".join(f"{name} {text[:MAX_HEADING_VALUE]}" for name, text in shown)
        found.append(ResultGroup(tuple(_merge(label, files) for label, files in by_label.items()), differs))
    return found


def _merge(label: str, files: Sequence[LoadedResult]) -> Series:
    cells: dict[tuple[Any, ...], Cell] = {}
    origins: dict[tuple[Any, ...], str] = {}
    missing: dict[str, Missing] = {}
    first = files[0]
    for item in files:
        result = item.result
        known, other = ((each.result.checkpoint.identity, each.result.overrides) for each in (first, item))
        if known != other:
            raise EvaluationError(
                f"label `{label}` is used for different models in {first.file} and {item.file}; evaluate one of them "
                "again with another --label"
            )
        for cell in result.results:
            if origins.setdefault(cell.key, item.file) != item.file:
                raise EvaluationError(
                    f"label `{label}` has the cell {' '.join(map(str, cell.key))} of {result.task} both in "
                    f"{origins[cell.key]} and in {item.file}; report only one of them"
                )
            cells[cell.key] = cell
        missing |= {entry.at: entry for entry in result.missing}
    return Series(label, first.result, dict(sorted(cells.items())), missing)
