"""`evaluate.py lm-eval`: tasks of lm-evaluation-harness on every variant, and their result file."""

import logging
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import (
    Cell,
    Cost,
    EvaluationError,
    Missing,
    Record,
    Result,
    Store,
    measured,
    out_of_memory,
)
from megatron_coca.evaluation.subject import Evaluation, Subject, noting_missing
from megatron_coca.model import DynamicLength

if TYPE_CHECKING:
    from megatron_coca.evaluation.harness.loading import HarnessTask

logger = logging.getLogger(__name__)

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)
"""Part of the identity of a result file: another text would be another measurement."""

HASHES = {"config_sha256": "configuration", "documents_sha256": "documents", "prompts_sha256": "prompts"}
"""The fields of a cell that say what was measured: of a task, or for a group of those of its tasks."""


class Score(Record):
    metric: str
    filter: str
    value: float
    stderr: float | None  # None if the harness gives none
    higher_is_better: bool | None


class TaskScores(Cell):
    """One task of the harness, or the mean of one of its groups."""

    task: str
    version: str | None
    num_fewshot: int | None  # None for a group whose tasks differ
    samples: int  # documents that were scored
    config_sha256: str  # of the task's configuration, paths left out
    documents_sha256: str  # of the documents in their order
    prompts_sha256: str  # of the first prompt of each document, examples included
    scores: list[Score]

    @property
    def key(self) -> tuple[str]:
        return (self.task,)


class HarnessProtocol(Record):
    text: str
    lm_eval: str  # its version
    max_length: int
    num_fewshot: int | None  # None: each task's own number
    limit: int | None
    seed: int
    bootstrap_iterations: int
    tokens_per_batch: int
    dynamic_length: DynamicLength = "total"  # the behaviour before the option existed
    start: int | None = None  # token put before every text


class HarnessResult(Result):
    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]


def run(args: Namespace) -> int:
    """Measure every variant; returns the exit status. Raises EvaluationError if the harness is not installed."""
    try:
        installed = version("lm_eval")
        from megatron_coca.evaluation.harness.loading import Selection, load_tasks
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"evaluate.py lm-eval needs lm-evaluation-harness ({error}): pip install 'lm-eval==0.4.13'"
        ) from error
    evaluation = Evaluation(subject_options(args), "lm-eval")
    evaluation.needed_tokenizer()
    options = {name: getattr(args, name) for name in ("num_fewshot", "limit", "seed", "bootstrap_iterations")}
    tasks = load_tasks(Selection(args.tasks, tuple(args.include_path), args.task_data, **options))
    protocol = HarnessProtocol(
        text=PROTOCOL,
        lm_eval=installed,
        max_length=args.max_length or evaluation.opened.trained.model.seq_length,
        tokens_per_batch=args.tokens_per_batch,
        dynamic_length=args.dynamic_length,
        start=evaluation.start_token(args.start_token),
        **options,
    )
    remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(HarnessResult, protocol=protocol):
        for task in [task for task in tasks if _is_needed(task, store, args.overwrite)]:
            with noting_missing(store, f"task {task.name}", remedy):
                _measure(task, subject, store)
    return evaluation.status


def _is_needed(task: "HarnessTask", store: Store[HarnessResult], overwrite: bool) -> bool:
    """Return whether the task is not in the file, or replaced by `overwrite`; a task that cannot be compared is noted.

    Raises EvaluationError if the file has scores of other documents, prompts or configurations.
    """
    stored = [cell for cell in store.result.results if cell.task in task.names]
    changes = []
    try:
        for cell in stored:
            expected = task.expected[cell.task]
            fields = [word for name, word in HASHES.items() if expected[name] != getattr(cell, name)]
            if fields:
                ending = "is another" if fields == ["configuration"] else "are others"
                changes.append(f"task {cell.task}: its {' and '.join(fields)} {ending}")
    except Exception as error:  # building prompts runs a task's own code
        _note_fault(store, task.name, error)
        return False
    if changes and not overwrite:
        raise EvaluationError(
            f"{store.path}: holds another measurement ({'; '.join(changes)}); name another --output, or replace it "
            "with --overwrite"
        )
    return bool(changes) or store.get((task.name,)) is None


def _measure(task: "HarnessTask", subject: Subject, store: Store[HarnessResult]) -> None:
    from megatron_coca.evaluation.harness.adapter import HarnessModel
    from megatron_coca.evaluation.harness.loading import fingerprints

    assert subject.tokenizer is not None, "checked before anything is loaded"
    protocol = store.result.protocol
    model = HarnessModel(
        subject.model,
        subject.tokenizer,
        protocol.max_length,
        protocol.tokens_per_batch,
        subject.vocab_size,
        protocol.dynamic_length,
        protocol.start,
    )
    try:
        with measured(subject.device) as meter:
            results = task.run(model)
        measurements = fingerprints(task.loaded)
        # The cell of the given name comes last: it says that those of all of its tasks are there.
        names = [*sorted({*results["results"], *results["group_subtasks"]} - {task.name}), task.name]
        cells = [task_scores(name, results, measurements[name]) for name in names]
    except PositionRangeError:
        raise
    # A task file can run any code; the fault of one task must not stop the others.
    except Exception as error:
        if out_of_memory(error):
            raise
        _note_fault(store, task.name, error)
        return
    for cell in cells[:-1]:
        store.put(cell)
    store.put(cells[-1], Cost.of(f"task {task.name}", meter, model.tokens))


def _note_fault(store: Store[HarnessResult], name: str, error: Exception) -> None:
    from megatron_coca.evaluation.harness.loading import reason

    logger.debug("task %s", name, exc_info=error)
    missing = Missing(at=f"task {name}", kind="failed", reason=reason(error))
    if store.get((name,)) is not None:
        store.noted.append(missing)  # the file keeps its scores, but the exit status tells
    else:
        store.miss(missing)


def task_scores(name: str, results: dict[str, Any], hashes: dict[str, str]) -> TaskScores:
    metrics = results["results"].get(name, {})
    higher_is_better = results["higher_is_better"].get(name, {})
    scores = []
    for key in sorted(metrics):
        metric, _, filtered = key.partition(",")
        if key in ("alias", "name", "sample_len", "sample_count") or metric.endswith("_stderr"):
            continue
        stderr = metrics.get(f"{metric}_stderr,{filtered}")
        scores.append(
            Score(
                metric=metric,
                filter=filtered,
                value=float(metrics[key]),
                stderr=float(stderr) if isinstance(stderr, int | float) else None,
                higher_is_better=higher_is_better.get(metric),
            )
        )
    version = results["versions"].get(name)
    shots = results["n-shot"].get(name)
    return TaskScores(
        task=name,
        version=None if version in (None, "Yaml") else str(version),  # "Yaml" if a task's file has none
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=_count(name, results),
        scores=scores,
        **hashes,
    )


def _count(name: str, results: dict[str, Any]) -> int:
    if name in results["n-samples"]:
        return results["n-samples"][name]["effective"]
    return sum(_count(child, results) for child in results["group_subtasks"].get(name, ()))
