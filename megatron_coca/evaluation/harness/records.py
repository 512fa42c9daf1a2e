"""The result file of `evaluate.py lm-eval`."""

from typing import Literal

from megatron_coca.evaluation.results import Cell, Record, Result


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
    config_sha256: str | None  # of the task's configuration, places on disk left out; None for groups
    documents_sha256: str | None  # of the documents in their order; None for groups
    prompts_sha256: str | None  # of the first prompt of each document, examples included; None for groups
    scores: list[Score]

    @property
    def key(self) -> tuple[str]:
        return (self.task,)


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


class HarnessResult(Result):
    """Scores by task."""

    task: Literal["lm-eval"] = "lm-eval"
    protocol: HarnessProtocol
    results: list[TaskScores]
