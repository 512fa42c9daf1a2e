"""Which files a report is made of."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from megatron_coca.evaluation.analysis.records import AnalysisResult
from megatron_coca.evaluation.harness.records import HarnessResult
from megatron_coca.evaluation.perplexity import PerplexityResult
from megatron_coca.evaluation.results import (
    SUFFIX,
    Cell,
    Cost,
    EvaluationError,
    Missing,
    Result,
    read_costs,
    read_record,
)
from megatron_coca.evaluation.retrieval.records import NeedleResult, PasskeyResult, RulerResult
from megatron_coca.evaluation.speed.records import SpeedResult

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
"""Every kind of result file by its field `task`."""

REPORT_FILE = "report.json"
REMEDY = "measure it again, or take the file away"
_SHOWN = 5


@dataclass(frozen=True)
class LoadedResult:
    """A result file as it was read, and what its cells cost."""

    file: str
    result: Result
    costs: tuple[Cost, ...] = ()


def read_results(places: Sequence[str | Path]) -> list[LoadedResult]:
    """The results of files, and of folders with all that is below them; each file once, folders by name.

    A result without a label has that of its checkpoint's folder. Raises EvaluationError for a file that is named and is no
    result, for a damaged one, and where there is none at all. What else a folder holds is told in a warning.
    """
    read: dict[Path, LoadedResult] = {}
    for place in map(Path, places):
        for file, named in _files(place):
            task = _task(file)
            if task is None and named:
                raise EvaluationError(f"{file}: is not a result of `evaluate.py` (its task is none of {_known()})")
            if task is not None:
                read.setdefault(file.resolve(), _load(file, task))
    if not read:
        raise EvaluationError("no results to report: name files of `evaluate.py TASK --output`, or folders of them")
    return list(read.values())


def _files(place: Path) -> Iterator[tuple[Path, bool]]:
    """The files of `place`, and whether they were named one by one."""
    if not place.is_dir():
        yield place, True
        return
    found = [path for path in sorted(place.rglob("*.json")) if _may_be_a_result(path.relative_to(place))]
    yield from ((path, False) for path in found)
    if foreign := [str(path) for path in found if _task(path) is None]:
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        logger.warning("left out, as they are no results: %s%s", ", ".join(foreign[:_SHOWN]), more)


def _may_be_a_result(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not (hidden or path.name.endswith(SUFFIX) or path.name == REPORT_FILE)


def _task(file: Path) -> str | None:
    """The field `task` where it is a known one. Raises EvaluationError for a file that cannot be read, or is no JSON: a
    result that was cut off does not show what it is.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{file}: is damaged, as it is no JSON ({error}); {REMEDY}") from error
    task = content.get("task") if isinstance(content, dict) else None
    return task if isinstance(task, str) and task in RESULT_TYPES else None


def _load(file: Path, task: str) -> LoadedResult:
    try:
        result = read_record(file, RESULT_TYPES[task], f"a result of `evaluate.py {task}`")
    except EvaluationError as error:
        raise EvaluationError(f"{error}; {REMEDY}") from error
    costs = read_costs(file)
    return LoadedResult(str(file), _labelled(result), tuple(costs.costs) if costs is not None else ())


def _labelled(result: Result) -> Result:
    if result.label.strip():
        return result
    place = result.checkpoint.path
    return result.model_copy(update={"label": Path(place).name or place})


def _known() -> str:
    return ", ".join(RESULT_TYPES)


def of_type(loaded: Iterable[LoadedResult], kind: type[Result]) -> list[LoadedResult]:
    """Those whose result is of one kind."""
    return [each for each in loaded if isinstance(each.result, kind)]


R = TypeVar("R", bound=Result)

Comparable = Mapping[str, Callable[[R], Any]]
"""What must agree before results may stand in one table: how it is called, and where a result has it."""


_LENGTH = re.compile(r"\b(?:window|length) (\d+)")
"""How tasks name a length in what is missing."""
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
_GROUPING_SHOWN = 100


@dataclass(frozen=True)
class Series(Generic[R]):
    """All that one label stands for in a group: its cells may come out of several files."""

    label: str
    header: R  # of the first file
    cells: dict[tuple[Any, ...], Any]
    missing: dict[str, Missing]
    costs: dict[str, Cost]

    def why(self, at: str) -> Missing:
        """Why there is no cell `at`."""
        unknown = Missing(at=at, kind="not run", reason="")
        return self.missing.get(at) or self.missing.get("all") or unknown


@dataclass(frozen=True)
class ResultGroup(Generic[R]):
    """Comparable series; `differs` names in what it is another than the other groups of its task."""

    series: tuple[Series[R], ...]
    differs: str = ""

    @property
    def first(self) -> R:
        """The header whose protocol is that of all."""
        return self.series[0].header

    @property
    def measured(self) -> tuple[Series[R], ...]:
        """Those that have a cell at all."""
        return tuple(each for each in self.series if each.cells)

    def cell_keys(self) -> list[Any]:
        """Of all cells, sorted."""
        return sorted({key for each in self.series for key in each.cells})

    def lengths(self) -> list[int]:
        """All that were asked for, measured or missing, ascending. In keys it is the first whole number."""
        missing = [at for each in self.series for at in each.missing]
        named = {int(found[1]) for at in missing if (found := _LENGTH.search(at))}
        return sorted(named | {_first_int(key) for key in self.cell_keys()})


def _first_int(key: tuple[Any, ...]) -> int:
    return next(part for part in key if isinstance(part, int))


def groups(loaded: Sequence[LoadedResult], comparable: Comparable[R]) -> list[ResultGroup[R]]:
    """Comparable results together, in the order of the files.

    Raises EvaluationError where one label of a group would stand for two models, or for two values of one cell.
    """
    found: dict[str, list[LoadedResult]] = {}
    for each in loaded:
        identity = repr([read(cast(R, each.result)) for read in comparable.values()])
        found.setdefault(identity, []).append(each)
    differing = _differing([members[0] for members in found.values()], comparable)
    return [ResultGroup(_series(members), _described(members[0], differing, comparable)) for members in found.values()]


def _differing(firsts: Sequence[LoadedResult], comparable: Comparable[Any]) -> list[str]:
    return [name for name, read in comparable.items() if len({repr(read(each.result)) for each in firsts}) > 1]


def _described(loaded: LoadedResult, differing: Iterable[str], comparable: Comparable[Any]) -> str:
    shown = {name: _HASH.sub(r"\1", str(comparable[name](loaded.result)))[:_GROUPING_SHOWN] for name in differing}
    return ", ".join(f"{name} {text}" for name, text in shown.items())


def _series(members: Sequence[LoadedResult]) -> tuple[Series[Any], ...]:
    by_label: dict[str, list[LoadedResult]] = {}
    for each in members:
        by_label.setdefault(each.result.label, []).append(each)
    return tuple(_merged(label, files) for label, files in by_label.items())


def _merged(label: str, files: Sequence[LoadedResult]) -> Series[Any]:
    cells: dict[tuple[Any, ...], Cell] = {}
    origin: dict[tuple[Any, ...], str] = {}
    missing: dict[str, Missing] = {}
    for each in files:
        result: Any = each.result
        _check_same_model(label, files[0], each)
        for cell in result.results:
            if origin.setdefault(cell.key, each.file) != each.file:
                key = " ".join(map(str, cell.key))
                raise EvaluationError(
                    f"label `{label}` has the cell {key} of {result.task} both in {origin[cell.key]} and in "
                    f"{each.file}; report only one of them"
                )
            cells[cell.key] = cell
        missing |= {entry.at: entry for entry in result.missing}
    costs = {cost.at: cost for each in files for cost in each.costs}
    return Series(label, files[0].result, dict(sorted(cells.items())), missing, costs)


def _check_same_model(label: str, known: LoadedResult, other: LoadedResult) -> None:
    models = [(each.result.checkpoint.identity, each.result.overrides) for each in (known, other)]
    if models[0] != models[1]:
        raise EvaluationError(
            f"label `{label}` stands for different models in {known.file} and {other.file}; evaluate one of them again "
            "with another --label"
        )
