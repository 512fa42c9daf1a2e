"""The result file of `evaluate.py lm-eval`."""

from typing import Any, Literal, NamedTuple

from megatron_coca.evaluation.results import Cell, Record, Result
from megatron_coca.model import DynamicLength


class Fingerprint(NamedTuple):
    """SHA-256 of what one task, or one group with all of its tasks, measures. Equal ones mean the same measurement."""

    config: str
    documents: str
    prompts: str


class Score(Record):
    """One metric of one filter of the harness."""

    metric: str
    filter: str
    value: float
    stderr: float | None  # None where the harness gives none
    higher_is_better: bool | None


class TaskScores(Cell):
    """One task of the harness, or the mean of one of its groups."""

    task: str
    version: str | None
    num_fewshot: int | None  # None for a group whose tasks differ
    samples: int  # documents that were scored
    config_sha256: str  # of the task's configuration, places on disk left out
    documents_sha256: str  # of the documents in their order
    prompts_sha256: str  # of the first prompt of each document, examples included
    scores: list[Score]

    @property
    def key(self) -> tuple[str]:
        return (self.task,)

    @property
    def fingerprint(self) -> Fingerprint:
        """What was measured. That of a group is over those of its tasks."""
        return Fingerprint(self.config_sha256, self.documents_sha256, self.prompts_sha256)


class HarnessProtocol(Record):
    """How was measured."""

    text: str
    lm_eval: str  # its version
    max_length: int
    num_fewshot: int | None  # None: what each task says
    limit: int | None
    seed: int
    bootstrap_iterations: int
    tokens_per_batch: int
    dynamic_length: DynamicLength = "total"  # files written before there was a choice do not say so


class HarnessResult(Result):
    """Scores by task."""

    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]


UNVERSIONED = (None, "Yaml")
"""What stands for a version where a task's file names none."""

NOT_METRICS = frozenset({"alias", "name", "sample_len", "sample_count"})


def task_scores(name: str, found: dict[str, Any], fingerprint: Fingerprint) -> TaskScores:
    """The scores of one task or group in the harness's answer."""
    metrics = found["results"].get(name, {})
    version = found["versions"].get(name)
    shots = found["n-shot"].get(name)
    return TaskScores(
        task=name,
        version=None if version in UNVERSIONED else str(version),
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=_count(name, found),
        config_sha256=fingerprint.config,
        documents_sha256=fingerprint.documents,
        prompts_sha256=fingerprint.prompts,
        scores=[
            _score(key, metrics, found["higher_is_better"].get(name, {}))
            for key in sorted(metrics)
            if key not in NOT_METRICS and not key.partition(",")[0].endswith("_stderr")
        ],
    )


def _score(key: str, metrics: dict[str, Any], better: dict[str, bool | None]) -> Score:
    metric, _, filtered = key.partition(",")
    stderr = metrics.get(f"{metric}_stderr,{filtered}")
    return Score(
        metric=metric,
        filter=filtered,
        value=float(metrics[key]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        higher_is_better=better.get(metric),
    )


def _count(name: str, found: dict[str, Any]) -> int:
    """Documents of a task, or of all tasks of a group, however deep they lie in it."""
    if name in found["n-samples"]:
        return found["n-samples"][name]["effective"]
    return sum(_count(child, found) for child in found["group_subtasks"].get(name, ()))
