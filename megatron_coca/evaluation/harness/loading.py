"""Tasks of the harness: found by name, loaded once for all models. Importing this needs lm_eval."""

import difflib
import hashlib
import importlib
import json
import logging
import random
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetNotFoundError
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import metric_registry
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable, hash_string

from megatron_coca.evaluation.harness.records import Fingerprint
from megatron_coca.evaluation.results import EvaluationError

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Of an object in memory: it differs from run to run, and a result file must not."""


SAYS_NOTHING = {"StopIteration": "nothing to read, as in an empty file of documents"}
"""What errors mean that come without a text."""


def reason(error: BaseException) -> str:
    """The error's type and text, and those of what it was raised from, down to the first cause; one line."""
    told = [_told(error)]
    cause = error.__cause__
    while cause is not None and not isinstance(error, EvaluationError):
        told.append(_told(cause))
        cause = cause.__cause__
    return ADDRESS.sub("", "; caused by ".join(told))


def _told(error: BaseException) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split())
    if isinstance(error, EvaluationError):
        return text
    text = text or SAYS_NOTHING.get(kind, "")
    return f"{kind}: {text}" if text else kind


NAME = "evaluate"


def import_namesake() -> None:
    """Import the package, if it is installed, so that the harness finds it among the loaded modules."""
    if NAME in sys.modules:
        return
    found = sys.path
    sys.path = [entry for entry in found if not (Path(entry or ".") / f"{NAME}.py").is_file()]
    try:
        importlib.import_module(NAME)
    except ImportError:
        pass  # a task that needs it says so
    finally:
        sys.path = found


NOT_DECIDING = frozenset({"dataset_kwargs", "task_alias", "tag", "group"})
"""Of a configuration: where files lie, and what a task is called."""

PLACES = frozenset({"config_source", "task_data"})
"""Metadata that say where files are."""


def task_fingerprint(task: Any) -> Fingerprint:
    """Of a task of the harness whose requests are built: of those documents that they are of."""
    first: dict[int, Instance] = {}
    for instance in sorted(task.instances, key=lambda each: (each.doc_id, each.idx)):
        first.setdefault(instance.doc_id, instance)
    return Fingerprint(
        config=_config_hash(task.dump_config()),
        documents=_hash([_document_hash(each.doc) for each in first.values()]),
        prompts=_hash([hash_string(each.args[0]) for each in first.values()]),
    )


def group_fingerprint(group: Any, tasks: dict[str, Fingerprint]) -> Fingerprint:
    """Of a group of the harness: how it takes the mean, and what its tasks measure, however deep they lie in it."""
    members = sorted((task.task_name, tasks[task.task_name]) for task in group.get_all_tasks())
    means = [vars(each) for each in group.aggregate_metric_list or ()]
    return Fingerprint(
        config=_hash([means, [(name, each.config) for name, each in members]]),
        documents=_hash([(name, each.documents) for name, each in members]),
        prompts=_hash([(name, each.prompts) for name, each in members]),
    )


def fingerprints(loaded: dict[str, Any]) -> dict[str, Fingerprint]:
    """Of every task and group that the harness loaded, by name."""
    tasks = {name: task_fingerprint(task) for name, task in loaded["tasks"].items()}
    return tasks | {name: group_fingerprint(group, tasks) for name, group in loaded.get("groups", {}).items()}


def _document_hash(document: Any) -> str:
    return hash_string(json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False))


def _config_hash(config: dict[str, Any]) -> str:
    """Of what decides the scores: neither where files lie nor where functions lie in memory."""
    kept = {name: value for name, value in config.items() if name not in NOT_DECIDING}
    said = config.get("metadata") or {}
    kept["metadata"] = {name: value for name, value in said.items() if name not in PLACES}
    return _hash(kept)


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()


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

    @property
    def names(self) -> frozenset[str]:
        """Of its tasks and groups: of the cells that it writes."""
        return frozenset({self.name, *self.loaded["tasks"], *self.loaded.get("groups", {})})

    @cached_property
    def expected(self) -> dict[str, Fingerprint]:
        """What `run` would measure, by name: every prompt is made for it, and no model is asked."""
        self._prepare()
        for task in self.loaded["tasks"].values():
            task.build_all_requests(limit=self.selection.limit)
        return fingerprints(self.loaded)

    def run(self, model: LM) -> dict[str, Any]:
        """What the harness makes of it, its samples included. The same whatever else was run before."""
        self._prepare()
        found = evaluate(
            lm=model,
            task_dict=self.loaded,
            limit=self.selection.limit,
            bootstrap_iters=self.selection.bootstrap_iterations,
            log_samples=True,
        )
        assert found is not None, "None is for processes other than the first"
        return found

    def measured(self) -> dict[str, Fingerprint]:
        """What `run` measured last, by name."""
        return fingerprints(self.loaded)

    def not_computed(self, found: dict[str, Any]) -> list[str]:
        """Metrics that a task asks for and that are not in what `run` returned, in words: the harness is silent there.
        Those of generated texts may go by other names in it.
        """
        return [
            f"task {name}: metric {metric} is not computed for {task.OUTPUT_TYPE}; left out"
            for name, task in self.loaded["tasks"].items()
            for metric in getattr(task, "_metric_fn_list", ())
            if task.OUTPUT_TYPE != "generate_until" and metric not in _metrics(found["results"][name])
        ]

    def _prepare(self) -> None:
        seed_global_states(self.selection.seed)
        for task in self.loaded["tasks"].values():
            _set_shots(task, self.selection.num_fewshot)
            task.set_fewshot_seed(seed=self.selection.seed)


@dataclass(frozen=True)
class Unloaded:
    """One name of a selection that could not be loaded; does what a Suite does by saying why."""

    name: str
    reason: str

    @property
    def names(self) -> frozenset[str]:
        """As of a Suite."""
        return frozenset({self.name})

    @property
    def expected(self) -> dict[str, Fingerprint]:
        """Raises EvaluationError."""
        raise EvaluationError(self.reason)

    def run(self, model: LM) -> dict[str, Any]:
        """Raises EvaluationError."""
        raise EvaluationError(self.reason)

    def measured(self) -> dict[str, Fingerprint]:
        """Raises EvaluationError."""
        raise EvaluationError(self.reason)

    def not_computed(self, found: dict[str, Any]) -> list[str]:
        """Raises EvaluationError."""
        raise EvaluationError(self.reason)


def seed_global_states(seed: int) -> None:
    """Files of tasks draw from the libraries' global states while they prepare documents and prompts."""
    random.seed(seed)
    np.random.seed(seed)


def _set_shots(task: Any, num_fewshot: int | None) -> None:
    own = task.get_config("num_fewshot")
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)


def _metrics(scores: dict[str, Any]) -> set[str]:
    return {key.partition(",")[0] for key in scores}


def unlike(expected: dict[str, Fingerprint], held: Iterable[tuple[str, Fingerprint]]) -> list[str]:
    """Of what is held by name, what is not as expected, in words."""
    return [
        f"task {name}: its {' and '.join(parts)} {'is another' if parts == ['configuration'] else 'are others'}"
        for name, other in held
        if (parts := _parts(expected[name], other))
    ]


def _parts(one: Fingerprint, other: Fingerprint) -> list[str]:
    words = ("configuration", "documents", "prompts")
    return [word for word, a, b in zip(words, one, other, strict=True) if a != b]


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
