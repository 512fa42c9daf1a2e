"""From what the harness returns to the records of a result file."""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from megatron_coca.evaluation.harness.records import Score, TaskScores

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Of an object in memory, in the text of a function that has no source."""

UNVERSIONED = (None, "Yaml")
"""What stands for a version where a task's file names none."""

NOT_METRICS = frozenset({"alias", "name", "sample_len", "sample_count"})
PLACES = frozenset({"config_source", "task_data"})
"""Metadata that say where files are."""


def task_scores(name: str, found: dict[str, Any]) -> TaskScores:
    """The scores of one task or group in the harness's answer."""
    metrics = found["results"].get(name, {})
    samples = found["samples"].get(name)
    version = found["versions"].get(name)
    shots = found["n-shot"].get(name)
    return TaskScores(
        task=name,
        version=None if version in UNVERSIONED else str(version),
        num_fewshot=shots if isinstance(shots, int) else None,
        samples=_count(name, found),
        config_sha256=None if samples is None else _config_hash(found["configs"][name]),
        documents_sha256=None if samples is None else _hash(_by_document(samples, "doc_hash")),
        prompts_sha256=None if samples is None else _hash(_by_document(samples, "prompt_hash")),
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


def _by_document(samples: Iterable[dict[str, Any]], kind: str) -> list[str]:
    """One hash for each document, filters aside, in the order of the documents."""
    return [value for _, value in sorted({each["doc_id"]: each[kind] for each in samples}.items())]


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _config_hash(config: dict[str, Any]) -> str:
    """Of what decides the scores: neither where files lie nor where functions lie in memory."""
    kept = {name: value for name, value in config.items() if name != "dataset_kwargs"}
    kept["metadata"] = {name: value for name, value in config.get("metadata", {}).items() if name not in PLACES}
    text = json.dumps(kept, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()
