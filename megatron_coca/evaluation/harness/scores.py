"""From what the harness returns to the records of a result file."""

from typing import Any

from megatron_coca.evaluation.harness.records import Fingerprint, Score, TaskScores

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
