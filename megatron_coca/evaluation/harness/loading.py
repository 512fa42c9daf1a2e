"""Tasks of the harness: found by name, loaded once for all models. Importing this needs lm_eval."""

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetNotFoundError
from lm_eval.api.registry import metric_registry
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from megatron_coca.evaluation.harness.failures import reason
from megatron_coca.evaluation.harness.namesake import import_namesake
from megatron_coca.evaluation.harness.suite import Selection, Suite, Unloaded, seed_global_states
from megatron_coca.evaluation.results import EvaluationError

logger = logging.getLogger(__name__)

OWN_TASKS = Path(__file__).parent / "tasks"
PLAIN_KINDS = frozenset({"TASK", "PY_TASK"})

NETWORK = "; without a network they have to be in the cache of the datasets library, or in a file that the task names"


def load_suites(selection: Selection) -> list[Suite | Unloaded]:
    """A suite for each name, tags taken apart into their tasks; where one cannot be loaded, why.

    Raises EvaluationError for a name that nobody knows.
    """
    import_namesake()
    absent = [path for path in selection.include if not path.is_dir()]
    if absent:
        raise EvaluationError(f"--include-path {absent[0]}: no such folder; name one with task files (*.yaml)")
    unreadable = _unreadable(selection.include)
    manager = _manager(selection)
    names = [name for given in selection.names for name in _expand(manager, given, unreadable)]
    for problem in unreadable:
        logger.warning("%s", problem)
    return [_load(manager, name, selection) for name in dict.fromkeys(names)]


def _unreadable(folders: Sequence[Path]) -> list[str]:
    """What is wrong with task files that the harness passes over without a word."""
    found = []
    for path in sorted(path for folder in folders for path in folder.glob("**/*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            found.append(f"{path}: cannot be read as a task file ({reason(error)})")
    return found


def _manager(selection: Selection) -> TaskManager:
    """The harness's own thousands of task files are read only where they are needed: that takes long."""
    folders = [str(path) for path in (OWN_TASKS, *selection.include)]
    said = {"task_data": str(selection.data)} if selection.data is not None else {}
    for defaults in (False, True):
        manager = TaskManager(include_path=folders, include_defaults=defaults, metadata=said)
        if all(_is_complete(manager, name) for name in selection.names):
            break
    return manager


def _is_complete(manager: TaskManager, name: Any) -> bool:
    """Whether a task, or a group with all of its members, is known; of a tag one never knows."""
    entry = manager.task_index.get(name) if isinstance(name, str) else None
    if entry is None or entry.kind.name != "GROUP":
        return entry is not None and entry.kind.name in PLAIN_KINDS
    members = (entry.cfg or {}).get("task", ())
    return isinstance(members, list) and all(_is_complete(manager, member) for member in members)


def _expand(manager: TaskManager, name: str, unreadable: Sequence[str]) -> Sequence[str]:
    entry = manager.task_index.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        files = "".join(f"; {problem}" for problem in unreadable)
        raise EvaluationError(
            f"--tasks {name}: no such task, group or tag{hint}; own task files go to --include-path{files}"
        )
    return sorted(entry.tags) if entry.kind.name == "TAG" else [name]


def _load(manager: TaskManager, name: str, selection: Selection) -> Suite | Unloaded:
    seed_global_states(selection.seed)
    try:
        loaded = dict(manager.load([name]))
        _check_metrics(loaded)
    except EvaluationError as error:
        return Unloaded(name, str(error))
    except (OSError, DatasetNotFoundError) as error:
        return Unloaded(name, f"its documents cannot be had ({reason(error)}){NETWORK}")
    # Whatever a task's file runs may raise; one task's fault is not the others'.
    except Exception as error:
        logger.debug("task %s", name, exc_info=True)
        unknown = _unknown_metrics((manager.task_index[name].cfg or {}).get("metric_list"))
        said = f"; the harness has no metric {', '.join(unknown)}" if unknown else ""
        return Unloaded(name, f"its file or its documents are not in order ({reason(error)}){said}; correct them")
    return Suite(name, loaded, selection)


def _check_metrics(loaded: dict[str, Any]) -> None:
    """The harness leaves an unknown metric out without a word where there are others."""
    for name, task in loaded["tasks"].items():
        computed = getattr(task, "_metric_fn_list", {})
        own = task.get_config("process_results") is not None
        absent = [] if own else [metric for metric, function in computed.items() if function is None]
        if absent:
            raise EvaluationError(
                f"the metric_list of {name} asks for {', '.join(absent)}, which the harness does not have; correct it"
            )


def _unknown_metrics(metrics: Any) -> list[str]:
    named = [each.get("metric") for each in metrics or () if isinstance(each, dict)]
    return [each for each in named if isinstance(each, str) and "/" not in each and each not in metric_registry]
