"""Digests of the YAML files, the code and the local data of a task or group of lm-evaluation-harness."""

import glob
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_coca.checkpoints.identity import file_digest
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import place_of, sources_of

NOT_HASHED = ("dataset_kwargs", "task_alias", "tag", "group")
"""Keys of a task's configuration with names or paths, which do not affect the measurement."""


def config_hash(manager: Any, name: str) -> str:
    """Return the hash of the configuration in a task's or group's file, or an empty string if it has no file."""
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None:
        return ""
    config = {key: value for key, value in entry.cfg.items() if key not in NOT_HASHED}
    text = json.dumps(config, sort_keys=True, default=str)
    for folder in (entry.yaml_path.parent, *_folders_of_functions(config)):
        text = text.replace(json.dumps(str(folder))[1:-1], "")
    return sha256(text.encode()).hexdigest()


def inputs_hash(manager: Any, name: str, folder: Path | None = None) -> str:
    """Return a hash of the local files that a task reads. For a group, it covers all of its tasks and configurations.

    The configuration names data sets on the Hugging Face Hub, and `documents_sha256` covers their content. If these
    data sets are read from a local `folder`, the hash includes their files.
    """
    digest = sha256()
    known: dict[Path, str] = {}  # the tasks of a benchmark share files
    for task in sorted(task_names(manager, name)):
        entry = manager.task_index[task]
        digest.update(config_hash(manager, task).encode() if task != name else b"")
        for path in (*_code(entry), *_data(entry.cfg), *_local_sources(entry.cfg, folder)):
            known[path] = known.get(path) or file_digest(path)
            digest.update(f"{path.suffix} {known[path]}\n".encode())
    return digest.hexdigest()


def task_names(manager: Any, name: str) -> set[str]:
    """Return the names of a task or group and of all its descendants that have a file."""
    return _leaves(manager, name, set())


def _local_sources(config: Mapping[str, Any] | None, folder: Path | None) -> list[Path]:
    """Return the files below the folder of `--datasets` that a task reads."""
    if folder is None or config is None:
        return []
    function = os.path.basename(str(config.get("custom_dataset") or ""))
    places = [place_of(source, folder) for source in sources_of(config.get("dataset_path"), function)]
    return [file for place in places for file in _files_of(place) if not is_hidden(file, folder)]


def is_hidden(file: Path, folder: Path) -> bool:
    """Return True for files such as those in the folder .cache that `hf download` writes beside a data set."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _leaves(manager: Any, name: str, seen: set[str]) -> set[str]:
    """Add the names of a task or group and of its descendants to `seen`, and return it."""
    entry = manager.task_index.get(name)
    if name in seen or entry is None:
        return seen
    if entry.yaml_path is not None:
        seen.add(name)
    children = [*entry.tags] if entry.kind.name == "TAG" else []
    listed = entry.cfg.get("task") if entry.kind.name == "GROUP" and entry.cfg is not None else []
    for child in [listed] if isinstance(listed, str) else listed or []:
        children += [child] if isinstance(child, str) else [child[key] for key in ("task", "group") if key in child]
    for child in children:
        if isinstance(child, str):
            _leaves(manager, child, seen)
    return seen


def _code(entry: Any) -> list[Path]:
    """Return the Python files in the folder of a task's file, and in the folders of the files that `!function` names.

    All files in these folders count, because they may import each other. A task file can include a file from another
    folder; the functions that this file names are covered too.
    """
    own = [entry.yaml_path.parent] if entry.yaml_path is not None else []
    folders = dict.fromkeys([*own, *_folders_of_functions(entry.cfg)])
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def _folders_of_functions(config: Mapping[str, Any] | None) -> list[Path]:
    """Return the folders of the files that define the functions of a configuration.

    The configuration contains `!function a.b.name` as the string FOLDER/a.b.name, which means the file FOLDER/a/b.py.
    """
    found = set()
    for text in _texts(config or {}):
        folder, name = os.path.split(text)
        file = os.path.join(folder, name.rpartition(".")[0].replace(".", "/") + ".py")
        if os.path.isabs(text) and os.path.isfile(file):
            found.add(Path(file).parent)
    return sorted(found)


def _data(config: Mapping[str, Any] | None) -> list[Path]:
    """Return the local files that a task's configuration names, directly or through patterns and folders."""
    kept = {key: value for key, value in (config or {}).items() if key in ("dataset_kwargs", "dataset_path")}
    found: dict[Path, None] = {}
    for text in _texts(kept):
        for place in [text] if os.path.exists(text) else sorted(glob.glob(text)):
            found |= dict.fromkeys(_files_of(Path(place)))
    return list(found)


def _files_of(path: Path) -> list[Path]:
    return [each for each in (sorted(path.rglob("*")) if path.is_dir() else [path]) if each.is_file()]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
