"""`evaluate.py lm-eval`: tasks of lm-evaluation-harness on every variant, and their result file."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from megatron_coca.attention.positions import PositionRangeError
from megatron_coca.evaluation.harness.task_files import config_hash, inputs_hash
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import (
    OPEN,
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

logger = logging.getLogger(__name__)

PROTOCOL = (
    "tasks of lm-evaluation-harness; log-likelihoods in nats from the float32 log-softmax over the padded vocabulary, "
    "summed in float64; a text without context follows the token that ends documents; what is longer than max_length "
    "loses its beginning; generation is greedy; perplexities over disjoint windows of max_length"
)
"""Part of the identity of a result file: another text would be another measurement."""


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
    config_sha256: str  # of the configuration in its file, paths left out; empty for a task that a group defines
    inputs_sha256: str | None = None  # of its code, its local data and its tasks; None in files of earlier versions
    documents_sha256: str | None  # of the documents in their order; None for a group
    prompts_sha256: str | None  # of the first prompt of each document, examples included; None for a group
    scores: list[Score]

    @property
    def key(self) -> tuple[str]:
        return (self.task,)


class HarnessProtocol(Record):
    model_config = OPEN

    text: str
    lm_eval: str  # its version
    max_length: int
    num_fewshot: int | None  # None: each task's own number
    limit: int | None
    seed: int
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
        from megatron_coca.evaluation.harness.adapter import index_tasks
    except (PackageNotFoundError, ImportError) as error:
        raise EvaluationError(
            f"evaluate.py lm-eval needs lm-evaluation-harness ({error}): pip install 'lm-eval==0.4.13'"
        ) from error
    evaluation = Evaluation(subject_options(args), "lm-eval")
    evaluation.needed_tokenizer()
    manager = index_tasks(args.tasks, args.include_path)
    entries = [(name, manager.task_index[name]) for name in args.tasks]
    names = [one for name, entry in entries for one in (sorted(entry.tags) if entry.kind.name == "TAG" else [name])]
    protocol = HarnessProtocol(
        text=PROTOCOL,
        lm_eval=installed,
        max_length=args.max_length or evaluation.opened.trained.model.seq_length,
        tokens_per_batch=args.tokens_per_batch,
        dynamic_length=args.dynamic_length,
        start=evaluation.start_token(args.start_token),
        **{name: getattr(args, name) for name in ("num_fewshot", "limit", "seed")},
    )
    remedy = "lower --tokens-per-batch or --max-length, or use --dtype bfloat16"
    for subject, store in evaluation.variants(HarnessResult, protocol=protocol):
        for name in dict.fromkeys(names):
            earlier = store.get((name,))
            if earlier is not None and (changed := _changed(earlier, manager)) is None:
                continue
            if earlier is not None and not args.overwrite:
                raise EvaluationError(
                    f"{store.path}: holds another measurement ({changed} of task {name} is another); name another "
                    "--output, or replace it with --overwrite"
                )
            with noting_missing(store, f"task {name}", remedy):
                _measure(name, manager, subject, store)
    return evaluation.status


def _changed(earlier: TaskScores, manager: Any) -> str | None:
    """Return what of a task or group is not as it was when its scores were measured, None if nothing is."""
    if earlier.config_sha256 != config_hash(manager, earlier.task):
        return "the configuration"
    if earlier.inputs_sha256 not in (None, inputs_hash(manager, earlier.task)):
        return "a file of code, data or tasks"
    return None


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _measure(name: str, manager: Any, subject: Subject, store: Store[HarnessResult]) -> None:
    from megatron_coca.evaluation.harness.adapter import HarnessModel, evaluate_task

    assert subject.tokenizer is not None, "checked before anything is loaded"
    given = store.result.protocol
    model = HarnessModel(
        subject.model,
        subject.tokenizer,
        given.max_length,
        given.tokens_per_batch,
        subject.vocab_size,
        given.dynamic_length,
        given.start,
    )
    settings = (given.num_fewshot, given.limit, given.seed)
    try:
        with measured(subject.device) as meter:
            results = evaluate_task(model, manager, name, *settings)
        # The cell of the given name comes last: it says that those of all of its tasks are there.
        names = [*sorted({*results["results"], *results["group_subtasks"]} - {name}), name]
        hashes = [(config_hash(manager, each), inputs_hash(manager, each)) for each in names]
        cells = [task_scores(each, results, *both) for each, both in zip(names, hashes, strict=True)]
    except PositionRangeError:
        raise
    # A task file can run any code; the fault of one task must not stop the others.
    except Exception as error:
        if out_of_memory(error):
            raise
        logger.debug("task %s", name, exc_info=error)
        store.miss(Missing(at=f"task {name}", kind="failed", reason=reason(error)))
        return
    for cell in cells[:-1]:
        store.put(cell)
    store.put(cells[-1], Cost.of(f"task {name}", meter, model.tokens))


def reason(error: BaseException) -> str:
    """Return the type and text of an error and of its causes in one line; of an EvaluationError its text alone."""
    if isinstance(error, EvaluationError):
        return str(error)
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
        cause = cause.__cause__
    return "; caused by ".join(texts)


def task_scores(name: str, results: dict[str, Any], config_sha256: str, inputs_sha256: str) -> TaskScores:
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
    samples = sorted(results["samples"].get(name, ()), key=lambda sample: sample["doc_id"])
    version = results["versions"].get(name)
    shots = results["n-shot"].get(name)
    return TaskScores(
        task=name,
        version=None if version in (None, "Yaml") else str(version),  # "Yaml" if a task's file has none
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=_count(name, results),
        config_sha256=config_sha256,
        inputs_sha256=inputs_sha256,
        documents_sha256=_hash_of(samples, "doc_hash"),
        prompts_sha256=_hash_of(samples, "prompt_hash"),
        scores=scores,
    )


def _hash_of(samples: Sequence[dict[str, Any]], field: str) -> str | None:
    return _hash("".join(sample[field] for sample in samples)) if samples else None


def _count(name: str, results: dict[str, Any]) -> int:
    if name in results["n-samples"]:
        return results["n-samples"][name]["effective"]
    return sum(_count(child, results) for child in results["group_subtasks"].get(name, ()))
