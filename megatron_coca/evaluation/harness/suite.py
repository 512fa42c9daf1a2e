"""Tasks of the harness: found, loaded once for all models, run one after another. Importing this needs lm_eval."""

import difflib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetsError
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from megatron_coca.evaluation.results import EvaluationError

OWN_TASKS = Path(__file__).parent / "tasks"
PLAIN_KINDS = frozenset({"TASK", "PY_TASK"})


@dataclass(frozen=True)
class Selection:
    """What is asked of the harness.

    Attributes:
        names: tasks, groups or tags.
        include: folders of further task files, which come before the harness's own.
        data: folder of the documents of the tasks in `tasks/`, or None.
        num_fewshot: examples before each document, None for what each task says; a task that insists on none has none.
        limit: documents of each task at most, None for all.
        seed: of the choice of examples.
        bootstrap_iterations: of standard errors that have no formula.
    """

    names: tuple[str, ...]
    include: tuple[Path, ...] = ()
    data: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    seed: int = 1234
    bootstrap_iterations: int = 1000


@dataclass(frozen=True)
class Suite:
    """One name of a selection with its tasks loaded, a group with all of its own."""

    name: str
    loaded: dict[str, Any]
    selection: Selection

    def run(self, model: LM) -> dict[str, Any]:
        """What the harness makes of it, its samples included. The same whatever else was run before."""
        chosen = self.selection
        for task in self.loaded["tasks"].values():
            _prepare(task, chosen.num_fewshot, chosen.seed)
        found = evaluate(
            lm=model,
            task_dict=self.loaded,
            limit=chosen.limit,
            bootstrap_iters=chosen.bootstrap_iterations,
            log_samples=True,
        )
        assert found is not None, "None is for processes other than the first"
        return found


def _prepare(task: Any, num_fewshot: int | None, seed: int) -> None:
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)


def load_suites(selection: Selection) -> list[Suite]:
    """A suite for each name, tags taken apart into their tasks.

    Raises EvaluationError for a name that nobody knows, and for a task whose files or documents cannot be had.
    """
    absent = [path for path in selection.include if not path.is_dir()]
    if absent:
        raise EvaluationError(f"--include-path {absent[0]}: no such folder; name one with task files (*.yaml)")
    manager = _manager(selection)
    names = [name for given in selection.names for name in _expand(manager, given)]
    return [_load(manager, name, selection) for name in dict.fromkeys(names)]


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


def _expand(manager: TaskManager, name: str) -> Sequence[str]:
    entry = manager.task_index.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, manager.all_tasks, n=3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise EvaluationError(f"--tasks {name}: no such task, group or tag{hint}; own task files go to --include-path")
    return sorted(entry.tags) if entry.kind.name == "TAG" else [name]


def _load(manager: TaskManager, name: str, selection: Selection) -> Suite:
    # Files of tasks draw from the libraries' global states while they prepare documents.
    random.seed(selection.seed)
    np.random.seed(selection.seed)
    try:
        return Suite(name, dict(manager.load([name])), selection)
    except EvaluationError:
        raise
    except (OSError, DatasetsError) as error:
        raise EvaluationError(
            f"task {name}: its documents cannot be had ({error}); without a network they have to be in the cache of the "
            "datasets library, or in a file that the task names"
        ) from error
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise EvaluationError(f"task {name}: its file is not in order ({error!r}); correct it") from error
