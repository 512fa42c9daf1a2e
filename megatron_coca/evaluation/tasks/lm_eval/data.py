"""Documents of lm-evaluation-harness's tasks: drawn with a seed, and read from the hub or the folder of `--datasets`.

The harness has no settings for this, so functions of the harness and its libraries are replaced while tasks are loaded.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import transformers
from lm_eval.api.task import ConfigurableTask

from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks.lm_eval.benchmarks import BABILONG, PUNKT, is_remote, place_of, sources_of
from megatron_coca.evaluation.tasks.lm_eval.ruler_lengths import check_lengths

FETCH = "python tools/fetch_benchmarks.py"


class PromptTokenizer:
    """The checkpoint's tokenizer, for tasks that generate prompts of a given length with a transformers tokenizer.

    It counts the tokens that the model reads, including the tokens that are added around the prompt.
    """

    def __init__(self, encode: Callable[[str], list[int]], vocab_size: int) -> None:
        self.encode, self.vocab_size = encode, vocab_size

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=self.encode(text))


@dataclass(frozen=True)
class TaskData:
    """The sources of documents.

    Attributes:
        tokenizer: measures the length of generated prompts, unless the metadata names a tokenizer other than `name`.
        name: the name of this tokenizer in the metadata.
        folder: the folder of `--datasets`; None: data sets come from the hub or its cache.
    """

    tokenizer: PromptTokenizer | None = None
    name: str = ""
    folder: Path | None = None

    @contextmanager
    def provided(self, seed: int, limit: int | None = None) -> Iterator[None]:
        """Provide the documents of tasks loaded in this context. Raises EvaluationError if they cannot be read.

        Random generators are seeded with `seed` before the code of each task runs, so its documents do not depend on
        other tasks. `limit` is the number of documents of each length, for tasks that generate several lengths.
        """
        _forget_task_code()
        from_pretrained, load_dataset = transformers.AutoTokenizer.from_pretrained, datasets.load_dataset
        download = ConfigurableTask.download

        def open_tokenizer(name: str, *arguments: Any, **settings: Any) -> Any:
            own = self.tokenizer is not None and name == self.name
            # The harness would run code from the tokenizer's folder, which a task must not do.
            return (
                self.tokenizer if own else from_pretrained(name, *arguments, **settings | {"trust_remote_code": False})
            )

        def load(path: str, *arguments: Any, **settings: Any) -> Any:
            if isinstance(settings.get("features"), dict):
                settings["features"] = _features(settings["features"])
            found = str(place_of(path, self.folder)) if self.folder is not None and is_remote(path) else path
            return load_dataset(found, *arguments, **settings)

        def download_task(task: ConfigurableTask, *arguments: Any, **settings: Any) -> None:
            self._check(task)
            random.seed(seed)
            np.random.seed(seed)
            try:
                download(task, *arguments, **settings)
            except (OSError, LookupError) as error:
                unreached = isinstance(error, OSError) or type(error) is LookupError  # nltk lacks its sentence splitter
                if self.folder is not None or not unreached or not (sources := task_sources(task)):
                    raise
                raise EvaluationError(_not_reached(sources, error)) from error
            if limit is not None and is_by_length(task):
                task.dataset = {split: _first_of_each(rows, limit) for split, rows in task.dataset.items()}

        with ExitStack() as replaced:
            replaced.enter_context(patch.object(transformers.AutoTokenizer, "from_pretrained", open_tokenizer))
            replaced.enter_context(patch.object(datasets, "load_dataset", load))
            replaced.enter_context(patch.object(ConfigurableTask, "download", download_task))
            if self.folder is not None:
                replaced.enter_context(patch("requests.get", self._read_file))
                replaced.enter_context(patch("nltk.data.path", [str(self.folder / Path(PUNKT).parts[0])]))
            yield

    def _check(self, task: ConfigurableTask) -> None:
        """Raise EvaluationError if local files of a task are missing, or if its lengths are too short."""
        if self.folder is not None:
            check_places(self.folder, task_sources(task))
        metadata = task.config.metadata
        if isinstance(metadata, dict):
            if task.config.dataset_path == BABILONG and not isinstance(metadata.get("max_seq_lengths", "0k"), str):
                raise EvaluationError(
                    f"--metadata max_seq_lengths {metadata['max_seq_lengths']!r}: babilong reads one length at a time; "
                    'write {"max_seq_lengths": "4k"}, and run other benchmarks separately'
                )
            check_lengths(_function_of(task), metadata)

    def _read_file(self, address: str, **_: Any) -> SimpleNamespace:
        """Answer `requests.get` with the local copy of a JSON file."""
        assert self.folder is not None
        content = place_of(address, self.folder).read_bytes()
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(content))


def task_sources(task: ConfigurableTask) -> tuple[str, ...]:
    return sources_of(task.config.dataset_path, _function_of(task))


def _function_of(task: ConfigurableTask) -> str:
    """Return the module and name of the function that makes the task's documents, or an empty string."""
    function = task.config.custom_dataset
    if not hasattr(function, "__name__"):
        return ""
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def is_by_length(task: Any) -> bool:
    """Return True if the task generates documents of several lengths, like ruler. Then `--limit` is per length."""
    found = getattr(task, "dataset", None)
    splits = list(found.values()) if isinstance(found, dict) else []
    return bool(splits) and all("max_length" in (getattr(rows, "column_names", None) or ()) for rows in splits)


def _first_of_each(rows: datasets.Dataset, number: int) -> datasets.Dataset:
    kept: dict[int, list[int]] = {}
    for index, length in enumerate(rows["max_length"]):
        kept.setdefault(length, []).append(index)
    return rows.select([index for found in kept.values() for index in found[:number]])


def _features(given: Mapping[str, Any]) -> datasets.Features:
    """Convert the features that a task's file declares, like those of infinitebench, to the types of `datasets`."""
    if not all(isinstance(kind, Mapping) and "dtype" in kind for kind in given.values()):
        return datasets.Features(given)
    values = {name: datasets.Value(kind["dtype"]) for name, kind in given.items()}
    return datasets.Features(
        {name: datasets.List(value) if given[name].get("sequence") else value for name, value in values.items()}
    )


def check_places(folder: Path, sources: Sequence[str]) -> None:
    """Raise EvaluationError if a source is not below the folder of `--datasets`."""
    if lacking := [source for source in sources if not place_of(source, folder).exists()]:
        raise EvaluationError(
            f"--datasets {folder}: has no {', '.join(str(place_of(each, Path())) for each in lacking)}; run "
            f"`{FETCH} {' '.join(lacking)} --output DIR` on a machine with a network, and copy the content of DIR there"
        )


def _not_reached(sources: Sequence[str], error: BaseException) -> str:
    cause = next(iter(str(error).strip().splitlines()), "")
    return (
        f"data {', '.join(sources)}: cannot be downloaded ({type(error).__name__}: {cause}); run `{FETCH} "
        f"{' '.join(sources)} --output DIR` on a machine with a network, copy DIR here, and add --datasets DIR"
    )


def _forget_task_code() -> None:
    """Remove the imported modules of tasks, because some of them keep a random generator, data or a tokenizer."""
    own = [name for name in sys.modules if name.startswith("lm_eval.tasks.") and name.count(".") > 2]
    others = [name for name, module in sys.modules.items() if hasattr(module, "__mtime__")]  # set by the harness
    for name in {*own, *others}:
        del sys.modules[name]
