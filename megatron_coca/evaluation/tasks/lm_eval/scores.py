"""The entries of a result of `megatron-coca evaluate lm-eval`, made from the harness's results."""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from statistics import fmean
from typing import Any

from megatron_coca.evaluation.results import Entry, Record
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import LONGBENCH_BUCKETS, bucket_of
from megatron_coca.evaluation.tasks.lm_eval.samples import LoggedFile

NOT_MEASURED = -1.0
"""The value that the harness reports for a score it did not measure, such as a length without samples in ruler."""


class Score(Record):
    metric: str
    filter: str
    value: float | None  # None if the score was not measured
    stderr: float | None  # None if the harness reports no standard error
    higher_is_better: bool | None


class LengthScore(Record):
    """The mean score of a task's samples of one length, in tokens for RULER or as a range of words for LongBench-E."""

    length: str
    samples: int
    value: float
    cut: int = 0  # samples with a truncated prompt


class TaskScores(Entry):
    """Scores of one task of the harness, or means over the tasks of one group."""

    task: str
    version: str | None
    num_fewshot: int | None  # number of examples; None for a group if its tasks differ
    samples: int  # number of scored documents
    config_sha256: str  # hash of the configuration in the task's file, without paths; empty without a file
    inputs_sha256: str  # hash of code, local data and subtasks
    documents_sha256: str | None  # hash of the documents in order; None for a group
    prompts_sha256: str | None  # hash of each document's first prompt, including examples; None for a group
    cut: int = 0  # samples with a prompt that exceeded the limit and was truncated
    unfinished: int = 0  # samples with an answer that had not ended after the task's number of new tokens
    scores: list[Score]
    by_length: list[LengthScore] = []  # for tasks with documents of several lengths, as in RULER and LongBench-E
    logged: list[LoggedFile] = []  # logs of the task or of all tasks of the group; empty without --log-samples

    @property
    def key(self) -> tuple[str]:
        return (self.task,)


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def task_scores(
    name: str,
    results: dict[str, Any],
    config_sha256: str,
    inputs_sha256: str,
    cut: Mapping[str, Collection[int]],
    logged: Mapping[str, LoggedFile],
    unfinished: Mapping[str, Collection[int]] | None = None,
) -> TaskScores:
    """Return the entry of a task or group.

    `cut` maps each task to its documents with a truncated prompt. `unfinished` maps each task to its documents with an
    answer that had not ended.
    """
    samples = sorted(results["samples"].get(name, ()), key=lambda sample: sample["doc_id"])
    version = results["versions"].get(name)
    shots = results["n-shot"].get(name)
    tasks = _tasks_of(name, results)
    return TaskScores(
        task=name,
        version=None if version in (None, "Yaml") else str(version),  # "Yaml" means that the task's file has no version
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=sum(results["n-samples"][task]["effective"] for task in tasks),
        config_sha256=config_sha256,
        inputs_sha256=inputs_sha256,
        documents_sha256=_hash_of(samples, "doc_hash"),
        prompts_sha256=_hash_of(samples, "prompt_hash"),
        cut=sum(len(cut.get(task, ())) for task in tasks),
        unfinished=sum(len((unfinished or {}).get(task, ())) for task in tasks),
        scores=_scores(name, results),
        by_length=_by_length(name, samples, cut.get(name, ())),
        logged=[logged[task] for task in tasks if task in logged],
    )


def _scores(name: str, results: dict[str, Any]) -> list[Score]:
    metrics = results["results"].get(name, {})
    higher_is_better = results["higher_is_better"].get(name, {})
    scores = []
    for key in sorted(metrics):
        metric, _, filtered = key.partition(",")
        if key in ("alias", "name", "sample_len", "sample_count") or metric.endswith("_stderr"):
            continue
        absent = any(_is_absent(task, metric, key, results) for task in _tasks_of(name, results))
        stderr = metrics.get(f"{metric}_stderr,{filtered}")
        scores.append(
            Score(
                metric=metric,
                filter=filtered,
                value=None if absent else float(metrics[key]),
                stderr=float(stderr) if isinstance(stderr, int | float) and not absent else None,
                higher_is_better=higher_is_better.get(metric),
            )
        )
    return scores


def _by_length(name: str, samples: Sequence[Mapping[str, Any]], cut: Collection[int]) -> list[LengthScore]:
    """Return the scores of a task of RULER or LongBench-E by length, shortest first; an empty list for other tasks."""
    found: dict[tuple[int, str], list[tuple[float, bool]]] = {}
    for sample in samples:
        document = sample.get("doc", {})
        if str(document.get("max_length")) in sample:
            key, score = (document["max_length"], str(document["max_length"])), sample[str(document["max_length"])]
        elif name.startswith("longbench_") and name.endswith("_e"):
            bucket = bucket_of(int(document["length"]))
            key, score = (LONGBENCH_BUCKETS[bucket][0], bucket), sample["score"]
        else:
            return []
        found.setdefault(key, []).append((float(score), sample["doc_id"] in cut))
    return [
        LengthScore(length=length, samples=len(all_), value=fmean(s for s, _ in all_), cut=sum(c for _, c in all_))
        for (_, length), all_ in sorted(found.items())
    ]


def _is_absent(task: str, metric: str, key: str, results: dict[str, Any]) -> bool:
    """Return True if a task's score is `NOT_MEASURED` because every sample has this score."""
    found = [sample[metric] for sample in results["samples"].get(task, ()) if metric in sample]
    at_all = results["results"].get(task, {}).get(key) == NOT_MEASURED
    return at_all and bool(found) and all(isinstance(one, int | float) and one == NOT_MEASURED for one in found)


def _tasks_of(name: str, results: dict[str, Any]) -> list[str]:
    """Return all tasks of a group, including those of nested groups; for a task, return only its name."""
    if name in results["n-samples"]:
        return [name]
    return [task for child in results["group_subtasks"].get(name, ()) for task in _tasks_of(child, results)]


def _hash_of(samples: Sequence[dict[str, Any]], field: str) -> str | None:
    return _hash("".join(sample[field] for sample in samples)) if samples else None
