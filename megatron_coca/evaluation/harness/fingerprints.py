"""What a loaded task measures, as hashes: its configuration, its documents, its prompts. Importing this needs lm_eval."""

import hashlib
import json
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.utils import handle_non_serializable, hash_string

from megatron_coca.evaluation.harness.failures import ADDRESS
from megatron_coca.evaluation.harness.records import Fingerprint

NOT_DECIDING = frozenset({"dataset_kwargs", "task_alias", "tag", "group"})
"""Of a configuration: where files lie, and what a task is called."""

PLACES = frozenset({"config_source", "task_data"})
"""Metadata that say where files are."""


def task_fingerprint(task: Any) -> Fingerprint:
    """Of a task of the harness whose requests are built: of those documents that they are of."""
    first: dict[int, Instance] = {}
    for instance in sorted(task.instances, key=lambda each: (each.doc_id, each.idx)):
        first.setdefault(instance.doc_id, instance)
    return Fingerprint(
        config=_config_hash(task.dump_config()),
        documents=_hash([_document_hash(each.doc) for each in first.values()]),
        prompts=_hash([hash_string(each.args[0]) for each in first.values()]),
    )


def group_fingerprint(group: Any, tasks: dict[str, Fingerprint]) -> Fingerprint:
    """Of a group of the harness: how it takes the mean, and what its tasks measure, however deep they lie in it."""
    members = sorted((task.task_name, tasks[task.task_name]) for task in group.get_all_tasks())
    means = [vars(each) for each in group.aggregate_metric_list or ()]
    return Fingerprint(
        config=_hash([means, [(name, each.config) for name, each in members]]),
        documents=_hash([(name, each.documents) for name, each in members]),
        prompts=_hash([(name, each.prompts) for name, each in members]),
    )


def fingerprints(loaded: dict[str, Any]) -> dict[str, Fingerprint]:
    """Of every task and group that the harness loaded, by name."""
    tasks = {name: task_fingerprint(task) for name, task in loaded["tasks"].items()}
    return tasks | {name: group_fingerprint(group, tasks) for name, group in loaded.get("groups", {}).items()}


def _document_hash(document: Any) -> str:
    return hash_string(json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False))


def _config_hash(config: dict[str, Any]) -> str:
    """Of what decides the scores: neither where files lie nor where functions lie in memory."""
    kept = {name: value for name, value in config.items() if name not in NOT_DECIDING}
    said = config.get("metadata") or {}
    kept["metadata"] = {name: value for name, value in said.items() if name not in PLACES}
    return _hash(kept)


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()
