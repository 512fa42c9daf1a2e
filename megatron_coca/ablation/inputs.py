"""Digests of the files that an evaluation reads besides the checkpoint. If one changes, results count as missing."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron_coca.checkpoints import open_checkpoint
from megatron_coca.checkpoints.identity import file_digest
from megatron_coca.config import Config
from megatron_coca.data import DataError, Shard, corpus_files
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import sampled_digest, shard_paths
from megatron_coca.evaluation.documents import DocumentSource
from megatron_coca.evaluation.tasks.lm_eval.files import is_hidden
from megatron_coca.evaluation.tasks.retrieval.prompts import BUILTIN


class InputDigests:
    """Digests of files and shards. Each is computed only once, because all models are evaluated on the same files.

    Shards, and files above 64 MiB, are only sampled. `megatron-coca evaluate` detects changes that sampling misses,
    because it hashes the tokens that it reads.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bool], str] = {}

    def digest(self, args: Namespace, sources: list[DocumentSource], config: Config) -> str | None:
        """Return a digest of the files that a `megatron-coca evaluate` command reads, or None if it reads none.

        Args:
            args: the parsed options.
            sources: the sources named by `--data`.
            config: the run's configuration, with the test data for commands without `--data`.

        Raises DataError for a file that cannot be read.
        """
        found = [self._of(source) for source in sources or self._test_data(args, config)]
        found += [self._of(DocumentSource(str(file), False)) for file in _haystack(args)]
        found += _harness(args) if getattr(args, "include_path", None) else []
        found += [file_digest(file) for file in _data_sets(args)]
        if getattr(args, "evaluator", None):
            found.append(open_checkpoint(args.evaluator).identity)
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] if found else None

    def _of(self, source: DocumentSource) -> str:
        if source not in self._known:
            try:
                shard = Shard(source.path) if source.is_shard else None
                self._known[source] = file_digest(Path(source.path)) if shard is None else sampled_digest(shard)
            except OSError as error:
                raise DataError(
                    f"{source.path}: cannot be read ({error.strerror}); correct the path or the permissions"
                ) from error
        return self._known[source]

    def _test_data(self, args: Namespace, config: Config) -> Iterator[DocumentSource]:
        task = config.data.synthetic
        if not hasattr(args, "data") and not (hasattr(args, "shifts") and task is not None and task.text):
            return
        for path in config.data.test_data_paths or ():
            prefix = local_prefix(path, config.data.data_root)
            if shard_paths(prefix)[1].is_file():  # missing shards are reported when the command runs
                yield DocumentSource(prefix, True)


def _haystack(args: Namespace) -> list[Path]:
    names = getattr(args, "haystack", None) or []
    return [] if list(names) in ([], [BUILTIN]) else [Path(file) for file in corpus_files([*map(Path, names)])]


def _data_sets(args: Namespace) -> list[Path]:
    """Return the files in the folder of `--datasets`."""
    if (folder := getattr(args, "datasets", None)) is None:
        return []
    return [file for file in sorted(folder.rglob("*")) if file.is_file() and not is_hidden(file, folder)]


def _harness(args: Namespace) -> list[str]:
    """Return digests of the tasks that the user's files define. The harness's own tasks follow from its version."""
    from lm_eval.tasks import TaskManager

    from megatron_coca.evaluation.tasks.lm_eval.files import config_hash, inputs_hash

    manager = TaskManager(include_path=[*args.include_path], include_defaults=False)
    own = [name for name in args.tasks if name in manager.task_index]
    return [digest for name in own for digest in (config_hash(manager, name), inputs_hash(manager, name))]
