"""One name of `--tasks`: run, and compared with what a file holds. Importing this needs lm_eval."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from megatron_coca.evaluation.harness.fingerprints import fingerprints
from megatron_coca.evaluation.harness.records import Fingerprint
from megatron_coca.evaluation.results import EvaluationError


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
