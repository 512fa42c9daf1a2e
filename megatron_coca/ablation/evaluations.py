"""The evaluations of a model in an ablation: commands, checks before training, and digests of options and files."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.ablation.file import AblationFile, ModelEntry
from megatron_coca.ablation.inputs import InputDigests
from megatron_coca.config import Config, split_inputs
from megatron_coca.data import DataError
from megatron_coca.evaluation.documents import find_sources
from megatron_coca.evaluation.multiples import changes_in_tokens
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.suite import (
    CheckpointEntry,
    Command,
    SuiteFile,
    option_arguments,
    plan_commands,
    task_parser,
    task_variants,
)
from megatron_coca.support.plain_text import masked
from megatron_coca.support.remote_files import is_url

PlanEvaluation = Callable[[Mapping[str, dict[str, Any] | None], Path, Path], list[Command]]
"""A function that returns a model's evaluation commands for given tasks, a run folder and a results folder."""

RESULTS = Path("results")


def changed_config(config: Config, changes: Sequence[str] | None) -> Config:
    files, keys = split_inputs(changes_in_tokens(changes or [], config.model.seq_length))
    return config.override(keys, files)


class Measurements(NamedTuple):
    """Digests for each result file, which become `Cell.measurements` and `Cell.inputs`."""

    options: dict[Path, str]
    inputs: dict[Path, str]


def check_tasks(
    file: AblationFile,
    entry: ModelEntry,
    config: Config,
    dtype: str,
    plan: PlanEvaluation,
    inputs: InputDigests | None,
    absent: list[str] | None,
) -> tuple[Measurements, list[str]]:
    """Return the digests of all result files, and a line for each task that `megatron-coca evaluate` would not accept.

    If `inputs` is None, the data is not read. If the list `absent` is given, a line for data that cannot be read is
    added to it.
    """
    problems, found, own = [], Measurements({}, {}), config.flat()
    flat = {name: changed_config(config, changes).flat() for name, changes in entry.variants.items()}
    changed = {name: {key: now for key, now in keys.items() if now != own[key]} for name, keys in flat.items()}
    for name, options in file.tasks.items():
        try:
            only, others = task_variants(options)
            measured = [changes for variant, changes in changed.items() if only is None or variant in only]
            if not measured:
                continue
            (command,) = plan({name: options}, Path("run"), RESULTS)
            read = _check_arguments(command, config, inputs, absent)
            common = [name, dtype, option_arguments(name, others, config.model.seq_length)]
            for result, changes in zip(command.files, measured, strict=True):
                text = json.dumps([*common, changes], sort_keys=True)
                path = result.relative_to(RESULTS)
                found.options[path] = sha256(text.encode()).hexdigest()[:16]
                found.inputs.update({path: read} if read is not None else {})
        except (EvaluationError, DataError) as error:
            problems.append(str(error) if str(error).startswith("tasks.") else f"tasks.{name}: {error}")
    return found, problems


def _check_arguments(
    command: Command, config: Config, inputs: InputDigests | None, absent: list[str] | None
) -> str | None:
    """Return a digest of the files that a `megatron-coca evaluate` command reads, or None without files or `inputs`.

    Raises EvaluationError or DataError for the errors that the command would raise before it loads a model. If the list
    `absent` is given, nothing is fetched from a store, and errors about data are added to the list instead.
    """
    args: Namespace = task_parser(command.arguments[0]).parse_args(command.arguments[1:])
    subject_options(args)
    if inputs is None:
        return None
    data = getattr(args, "data", None) or []
    try:
        if absent is not None and (remote := [name for name in (*data, *_test_data(config)) if is_url(name)]):
            raise DataError(f"{', '.join(map(masked, remote))}: on a store, from which a plan fetches nothing")
        return inputs.digest(args, find_sources(data) if data else [], config)
    except (EvaluationError, DataError) as error:
        if absent is None:
            raise
        absent.append(f"tasks.{command.arguments[0]}: {error}")
        return None


def _test_data(config: Config) -> Sequence[str]:
    return config.data.test_data_paths or ()


def commands_of(
    label: str,
    entry: ModelEntry,
    config: Config,
    device: str,
    dtype: str,
    tasks: Mapping[str, dict[str, Any] | None],
    run: Path,
    results: Path,
) -> list[Command]:
    imports = config.position.imports  # passed explicitly, because evaluation ignores the imports named by a checkpoint
    own = [f"imports={json.dumps(imports)}"] if imports else []
    paths = config.data.test_data_paths or []
    # URLs are passed explicitly, because evaluation does not read data from URLs that only a checkpoint names.
    own += [f"test_data_paths={json.dumps(paths)}"] if any(map(is_url, paths)) else []
    checkpoint = CheckpointEntry(path=str(run), variants=entry.variants, set=own)
    suite = SuiteFile(title="", checkpoints={label: checkpoint}, tasks=dict(tasks))
    return plan_commands(suite, {label: config.model.seq_length}, results, device, dtype)
