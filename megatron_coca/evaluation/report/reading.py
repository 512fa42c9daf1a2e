"""Which files a report is made of."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_coca.evaluation.analysis.records import AnalysisResult
from megatron_coca.evaluation.harness.records import HarnessResult
from megatron_coca.evaluation.perplexity.records import PerplexityResult
from megatron_coca.evaluation.results import EvaluationError, Result, read_record
from megatron_coca.evaluation.retrieval.records import NeedleResult, PasskeyResult, RulerResult
from megatron_coca.evaluation.speed.records import SpeedResult
from megatron_coca.evaluation.store import SUFFIX, Cost, read_costs

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
class Loaded:
    """A result file as it was read, and what its cells cost."""

    file: str
    result: Result
    costs: tuple[Cost, ...] = ()


def read_results(places: Sequence[str | Path]) -> list[Loaded]:
    """The results of files, and of folders with all that is below them; each file once, folders by name.

    A result without a label has that of its checkpoint's folder. Raises EvaluationError for a file that is named and is no
    result, for a damaged one, and where there is none at all. What else a folder holds is told in a warning.
    """
    read: dict[Path, Loaded] = {}
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


def _load(file: Path, task: str) -> Loaded:
    try:
        result = read_record(file, RESULT_TYPES[task], f"a result of `evaluate.py {task}`")
    except EvaluationError as error:
        raise EvaluationError(f"{error}; {REMEDY}") from error
    costs = read_costs(file)
    return Loaded(str(file), _labelled(result), tuple(costs.costs) if costs is not None else ())


def _labelled(result: Result) -> Result:
    if result.label.strip():
        return result
    place = result.checkpoint.path
    return result.model_copy(update={"label": Path(place).name or place})


def _known() -> str:
    return ", ".join(RESULT_TYPES)


def of_type(loaded: Iterable[Loaded], kind: type[Result]) -> list[Loaded]:
    """Those whose result is of one kind."""
    return [each for each in loaded if isinstance(each.result, kind)]
