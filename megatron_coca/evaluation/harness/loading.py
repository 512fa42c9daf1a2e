"""Tasks of the harness, found by name and loaded once for all variants. Importing this needs lm_eval."""

import difflib
import hashlib
import importlib
import json
import logging
import random
import re
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetNotFoundError
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.utils import handle_non_serializable, hash_string

from megatron_coca.evaluation.results import EvaluationError

logger = logging.getLogger(__name__)

NOT_HASHED = ("dataset_kwargs", "task_alias", "tag", "group", "config_source", "task_data")
"""Names and paths in the configuration of a task, and in its metadata, that do not change what is measured."""
OWN_TASKS = Path(__file__).parent / "tasks"
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""A memory address in the repr of an object: it differs from run to run, and a result file must not."""


@dataclass(frozen=True)
class Selection:
    """The options of the harness."""

    names: tuple[str, ...]  # tasks, groups or tags
    include: tuple[Path, ...] = ()  # folders of more task files, which take precedence over the harness's own
    data: Path | None = None  # folder of the documents of the tasks in `tasks/`
    num_fewshot: int | None = None  # None for a task's own number; a task with 0 in its file keeps 0
    limit: int | None = None  # documents of each task at most, None for all
    seed: int = 1234  # of the choice of examples
    bootstrap_iterations: int = 1000  # samples for standard errors without a formula


@dataclass(frozen=True)
class HarnessTask:
    """One name of a selection: a task, or a group with all of its tasks; `fault` says why it could not be loaded."""

    name: str
    selection: Selection
    loaded: dict[str, Any]
    fault: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of its tasks and groups, which are those of the cells that it writes."""
        return frozenset({self.name, *self.loaded.get("tasks", ()), *self.loaded.get("groups", ())})

    @cached_property
    def expected(self) -> dict[str, dict[str, str]]:
        """Fingerprints of the tasks that `run` would measure, by name; builds every prompt. Raises EvaluationError."""
        self._prepare()
        for task in self.loaded["tasks"].values():
            task.build_all_requests(limit=self.selection.limit)
        return fingerprints(self.loaded)

    def run(self, model: LM) -> dict[str, Any]:
        """Return the harness's results with samples, independent of earlier runs. Raises EvaluationError if faulty."""
        self._prepare()
        results = evaluate(
            lm=model,
            task_dict=self.loaded,
            limit=self.selection.limit,
            bootstrap_iters=self.selection.bootstrap_iterations,
            log_samples=True,
        )
        assert results is not None, "only processes other than the first get None"
        return dict(results)

    def _prepare(self) -> None:
        if self.fault is not None:
            raise EvaluationError(self.fault)
        seed_global_states(self.selection.seed)
        for task in self.loaded["tasks"].values():
            own, shots = task.get_config("num_fewshot"), self.selection.num_fewshot
            if shots is not None and own != 0:
                task.set_config(key="num_fewshot", value=shots)
            elif own is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=self.selection.seed)


def seed_global_states(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def load_tasks(selection: Selection) -> list[HarnessTask]:
    """Load every name, tags expanded to their tasks; a name that cannot be loaded gets a `fault`.

    Raises EvaluationError for an unknown name.
    """
    import_evaluate_library()
    for folder in selection.include:
        if not folder.is_dir():
            raise EvaluationError(f"--include-path {folder}: no such folder; name one with task files (*.yaml)")
        for path in sorted(folder.glob("**/*.yaml")):
            try:
                load_yaml(path, resolve_func=False)  # the harness skips a file that it cannot read
            except Exception as error:
                raise EvaluationError(f"{path}: cannot be read as a task file ({reason(error)})") from error
    manager = _task_manager(selection)
    names: list[str] = []
    for name in selection.names:
        entry = manager.task_index.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise EvaluationError(
                f"--tasks {name}: no such task, group or tag{hint}; name a folder of your own tasks with --include-path"
            )
        names += sorted(entry.tags) if entry.kind.name == "TAG" else [name]
    return [_load(manager, name, selection) for name in dict.fromkeys(names)]


def import_evaluate_library() -> None:
    """Import Hugging Face's `evaluate` library, if installed, before the script evaluate.py can shadow it."""
    if "evaluate" in sys.modules:
        return
    path = sys.path
    sys.path = [entry for entry in path if not (Path(entry or ".") / "evaluate.py").is_file()]
    try:
        importlib.import_module("evaluate")
    except ImportError:
        pass  # a task that needs it says so
    finally:
        sys.path = path


def _task_manager(selection: Selection) -> TaskManager:
    """Index task files; the harness's own thousands, which take long, only if a name is not in the other folders."""
    folders = [str(path) for path in (OWN_TASKS, *selection.include)]
    metadata = {"task_data": str(selection.data)} if selection.data is not None else {}
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)

    def is_complete(name: Any) -> bool:
        """Return whether a task, or a group with all of its members, is known; never for a tag."""
        entry = manager.task_index.get(name) if isinstance(name, str) else None
        if entry is None or entry.kind.name != "GROUP":
            return entry is not None and entry.kind.name in ("TASK", "PY_TASK")
        members = (entry.cfg or {}).get("task", ())
        return isinstance(members, list) and all(map(is_complete, members))

    if all(map(is_complete, selection.names)):
        return manager
    return TaskManager(include_path=folders, include_defaults=True, metadata=metadata)


def _load(manager: TaskManager, name: str, selection: Selection) -> HarnessTask:
    seed_global_states(selection.seed)
    try:
        loaded = dict(manager.load([name]))
        for task_name, task in loaded["tasks"].items():
            # The harness silently leaves out an unknown metric if there are others.
            own = task.get_config("process_results") is not None
            metrics = {} if own else getattr(task, "_metric_fn_list", {})
            if absent := [metric for metric, function in metrics.items() if function is None]:
                raise EvaluationError(
                    f"the metric_list of {task_name} asks for {', '.join(absent)}, which the harness does not have; "
                    "correct it"
                )
    except EvaluationError as error:
        fault = str(error)
    except (OSError, DatasetNotFoundError) as error:
        fault = (
            f"its documents cannot be read ({reason(error)}); without a network they have to be in the cache of the "
            "datasets library, or in a file that the task names"
        )
    # A task file can run any code; the fault of one task must not stop the others.
    except Exception as error:
        logger.debug("task %s", name, exc_info=True)
        fault = f"its file or its documents are not valid ({reason(error)}); correct them"
    else:
        return HarnessTask(name, selection, loaded)
    return HarnessTask(name, selection, {}, fault)


def reason(error: BaseException) -> str:
    """Return the type and text of an error and of its causes in one line; of an EvaluationError its text alone."""
    if isinstance(error, EvaluationError):
        return str(error)
    texts, cause = [], error
    while True:
        text = " ".join(str(cause).split())
        if isinstance(cause, StopIteration) and not text:
            text = "nothing to read, as in an empty file of documents"
        texts.append(f"{type(cause).__name__}: {text}" if text else type(cause).__name__)
        if cause.__cause__ is None:
            return ADDRESS.sub("", "; caused by ".join(texts))
        cause = cause.__cause__


def fingerprints(loaded: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the hashes of what every task and group measures, by the names of the fields in the result file.

    Of a task: its configuration without paths, the documents that the requests are of, and their first prompts; of a
    group: its means, and those of its tasks.
    """
    found = {name: _task_fingerprint(task) for name, task in loaded["tasks"].items()}
    for name, group in loaded.get("groups", {}).items():
        tasks = sorted(task.task_name for task in group.get_all_tasks())
        hashes = {field: [(task, found[task][field]) for task in tasks] for field in found[tasks[0]]}
        means = [vars(metric) for metric in group.aggregate_metric_list or ()]
        found[name] = {field: _hash([means, of] if field == "config_sha256" else of) for field, of in hashes.items()}
    return found


def _task_fingerprint(task: Any) -> dict[str, str]:
    first: dict[int, Any] = {}
    for instance in sorted(task.instances, key=lambda instance: (instance.doc_id, instance.idx)):
        first.setdefault(instance.doc_id, instance)
    dump = partial(json.dumps, indent=2, default=handle_non_serializable, ensure_ascii=False)
    config = {name: value for name, value in task.dump_config().items() if name not in NOT_HASHED}
    metadata = config.get("metadata") or {}
    config["metadata"] = {name: value for name, value in metadata.items() if name not in NOT_HASHED}
    return {
        "config_sha256": _hash(config),
        "documents_sha256": _hash([hash_string(dump(instance.doc)) for instance in first.values()]),
        "prompts_sha256": _hash([hash_string(instance.args[0]) for instance in first.values()]),
    }


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()
