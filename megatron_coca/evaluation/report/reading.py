"""Read result files, and group comparable results."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from megatron_coca.evaluation import results
from megatron_coca.evaluation.declaration import Comparable
from megatron_coca.evaluation.results import Entry, EvaluationError, Missing, Result, differences
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.support.regular_files import read_regular

logger = logging.getLogger(__name__)

KNOWN_FILES = frozenset({"cell.json", "curve.json"})
"""Names of files that an ablation writes beside its results. They are ignored without a warning."""
LONGEST_LABEL = 10_000
"""Maximum number of characters in a label. Programs that read CSV files limit the length of a field too."""
REMEDY = "measure it again, or remove the file"


@dataclass(frozen=True)
class LoadedResult:
    """The path and content of a result file."""

    file: str
    result: Result


def read_results(paths: Sequence[str | Path]) -> list[LoadedResult]:
    """Read result files, and those below folders. Each file is read once; the files of a folder are sorted by name.

    Other JSON files in a folder cause a warning. Raises EvaluationError if a named file is not a result, if a file is
    damaged, or if there are no results.
    """
    loaded: dict[Path, LoadedResult] = {}
    for path in map(Path, paths):
        ignored = []
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
            if path.is_dir() and (hidden or file.name.endswith(results.SUFFIX) or file.name in KNOWN_FILES):
                continue
            task = _task(file)
            if task is not None:
                loaded.setdefault(file.resolve(), _load(file, task))
            elif path.is_dir():
                ignored.append(str(file))
            else:
                tasks = ", ".join(TASKS)
                raise EvaluationError(
                    f"{file}: is not a result of `megatron-coca evaluate` (task: {tasks}); name another file"
                )
        if ignored:
            logger.warning("ignored %d files that are not results, such as %s", len(ignored), ignored[0])
    if not loaded:
        raise EvaluationError(
            "results: none found; name files of `megatron-coca evaluate TASK --output`, or folders of them"
        )
    return list(loaded.values())


def _task(file: Path) -> str | None:
    """Return the field `task` of a file if it is a known task, otherwise None.

    Raises EvaluationError for a file that is not readable JSON, because it may be a truncated result.
    """
    try:
        content = json.loads(read_regular(file))
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read ({error.strerror}); check path and permissions") from error
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{file}: is damaged: not JSON ({error}); {REMEDY}") from error
    task = content.get("task") if isinstance(content, dict) else None
    return task if isinstance(task, str) and task in TASKS else None


def _load(file: Path, task: str) -> LoadedResult:
    try:
        result = results.read_record(file, TASKS[task].result, f"a result of `megatron-coca evaluate {task}`")
    except EvaluationError as error:
        raise EvaluationError(f"{error}; {REMEDY}") from error
    if len(result.label) > LONGEST_LABEL:
        found = f"{len(result.label):,} characters, more than {LONGEST_LABEL:,}"
        raise EvaluationError(f"{file}: label: {found}; {REMEDY}")
    return LoadedResult(str(file), result)


_LENGTH = re.compile(r"\b(?:window|length) (\d+)")
"""Matches a length in the `at` of a missing entry."""
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
MAX_HEADING_VALUE = 100
"""Maximum number of characters of a value in a group's heading."""


@dataclass(frozen=True)
class Replicate:
    """All results of one label and seed in a group, from one or more files; `header` is the first result."""

    header: Any
    entries: dict[tuple[Any, ...], Any]
    missing: dict[str, Missing]

    def why(self, at: str) -> Missing:
        unknown = Missing(at=at, kind="not run", reason="")
        return self.missing.get(at) or self.missing.get("all") or unknown


@dataclass(frozen=True)
class Series:
    """The replicates of one label, sorted by seed: models that differ only in their training seed."""

    label: str
    replicates: tuple[Replicate, ...]

    @property
    def header(self) -> Any:
        return self.replicates[0].header

    @property
    def keys(self) -> set[tuple[Any, ...]]:
        return {key for replicate in self.replicates for key in replicate.entries}

    def entries(self) -> list[Any]:
        return [entry for replicate in self.replicates for entry in replicate.entries.values()]

    def missing(self) -> set[str]:
        return {at for replicate in self.replicates for at in replicate.missing}


@dataclass(frozen=True)
class ResultGroup:
    """Comparable series; `differs` describes how the group differs from the task's other groups."""

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
        return [series for series in self.series if series.keys]

    def entry_keys(self) -> list[Any]:
        return sorted(set().union(*(series.keys for series in self.series)))

    def lengths(self) -> list[int]:
        missing = [_LENGTH.search(at) for series in self.series for at in series.missing()]
        measured = {next(part for part in key if isinstance(part, int)) for key in self.entry_keys()}
        return sorted(measured | {int(match[1]) for match in missing if match})

    def training_lengths(self) -> set[int]:
        return {series.header.checkpoint.seq_length for series in self.series}


def group_results(loaded: Sequence[LoadedResult], comparable: Comparable) -> list[ResultGroup]:
    """Group comparable results, in the order of the files.

    Raises EvaluationError if a label in a group has two models, or two values for the same entry.
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
        found.append(ResultGroup(tuple(_series(label, files) for label, files in by_label.items()), differs))
    return found


def _series(label: str, files: Sequence[LoadedResult]) -> Series:
    """Return the series of one label. Raises EvaluationError if its models differ in more than their training seed."""
    by_weights: dict[str, list[LoadedResult]] = {}
    references = [files[0]]
    for name in LATER:  # the first file may be too old to record it
        references += [item for item in files if getattr(item.result.checkpoint, name) is not None][:1]
    for item in files:
        for known in references:
            if differing := _disagreement(known.result, item.result):
                raise _different_models(label, known, item, f"differ in {', '.join(differing)}")
        by_weights.setdefault(item.result.checkpoint.identity, []).append(item)
    firsts = [items[0] for items in by_weights.values()]
    seeds = [first.result.checkpoint.seed for first in firsts]
    for index, first in enumerate(firsts[1:], 1):
        if None in seeds:
            raise _different_models(label, firsts[0], first)
        if (earlier := seeds.index(seeds[index])) < index:
            raise _different_models(label, firsts[earlier], first)
    ordered = sorted(by_weights.values(), key=lambda items: items[0].result.checkpoint.seed or 0)
    return Series(label, tuple(_merge(label, items) for items in ordered))


def _disagreement(one: Result, other: Result) -> list[str]:
    """Return the names of the properties in which two models differ, although replicates must agree in them.

    A property in LATER is compared only if both files have it, because older versions did not record it.
    """
    models = [each.checkpoint.model_dump(mode="json", include=SAME_FOR_SEEDS) for each in (one, other)]
    unknown = {name for name in LATER for model in models if model[name] is None}
    kept = [{name: model[name] for name in model.keys() - unknown} for model in models]
    before, now = (
        {"checkpoint": model, "overrides": each.overrides} for model, each in zip(kept, (one, other), strict=True)
    )
    return differences(before, now)


LATER = ("network", "recipe")
SAME_FOR_SEEDS = {"step", "seq_length", "pos_emb", "trained_with", *LATER}


def _different_models(
    label: str, one: LoadedResult, other: LoadedResult, how: str = "are different models"
) -> EvaluationError:
    return EvaluationError(
        f"label `{label}`: {one.file} and {other.file} {how}, not only in their seeds; evaluate one of them again with "
        "another --label"
    )


def _merge(label: str, files: Sequence[LoadedResult]) -> Replicate:
    entries: dict[tuple[Any, ...], Entry] = {}
    origins: dict[tuple[Any, ...], str] = {}
    missing: dict[str, Missing] = {}
    for item in files:
        result: Any = item.result
        task = TASKS[result.task]
        for entry in result.results:
            if task.by_document and entry.documents < result.documents.count:
                reason = f"interrupted: the first {entry.documents} of {result.documents.count} documents"
                at = task.at.format(*entry.key)
                missing[at] = Missing(at=at, kind="not run", reason=reason)
                continue
            if origins.setdefault(entry.key, item.file) != item.file:
                raise EvaluationError(
                    f"label `{label}`: has the entry {' '.join(map(str, entry.key))} of {result.task} both in "
                    f"{origins[entry.key]} and in {item.file}; report only one of them"
                )
            entries[entry.key] = entry
        missing |= {each.at: each for each in result.missing}
    return Replicate(files[0].result, dict(sorted(entries.items())), missing)
