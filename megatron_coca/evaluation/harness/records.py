"""The result file of `evaluate.py lm-eval`, its console table, and scores out of the harness's results."""

from typing import Any, Literal, NamedTuple

from megatron_coca.evaluation.options import dynamic_length_text
from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.model import DynamicLength
from megatron_coca.tables import format_table


class Fingerprint(NamedTuple):
    """SHA-256 of what a task, or a group with its tasks, measures; equal ones mean the same measurement."""

    config: str
    documents: str
    prompts: str


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

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint of a task; for a group, of the fingerprints of its tasks."""
        return Fingerprint(self.config_sha256, self.documents_sha256, self.prompts_sha256)


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


class HarnessResult(Result):
    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]


def task_scores(name: str, results: dict[str, Any], fingerprint: Fingerprint) -> TaskScores:
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
        config_sha256=fingerprint.config,
        documents_sha256=fingerprint.documents,
        prompts_sha256=fingerprint.prompts,
        scores=scores,
    )


def _count(name: str, results: dict[str, Any]) -> int:
    if name in results["n-samples"]:
        return results["n-samples"][name]["effective"]
    return sum(_count(child, results) for child in results["group_subtasks"].get(name, ()))


def console_table(result: HarnessResult) -> str:
    rows = [
        [
            cell.task,
            "-" if cell.num_fewshot is None else str(cell.num_fewshot),
            score.filter,
            score.metric,
            f"{score.value:.4f}",
            "-" if score.stderr is None else f"{score.stderr:.4f}",
            str(cell.samples),
        ]
        for cell in result.results
        for score in cell.scores
    ]
    title = f"{result.label}: trained at {result.checkpoint.seq_length}, up to {result.protocol.max_length} tokens"
    names = ["task", "shots", "filter", "metric", "value", "stderr", "documents"]
    return f"{title}\n\n{format_table(names, rows)}\n\n{dynamic_length_text(result.protocol.dynamic_length)}\n"
