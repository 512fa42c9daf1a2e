"""The cells of an ablation. A cell is one training run with its evaluations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from megatron_coca.ablation.evaluations import (
    RESULTS,
    Measurements,
    PlanEvaluation,
    changed_config,
    check_tasks,
    commands_of,
)
from megatron_coca.ablation.file import AblationFile, ModelEntry, unknown_names
from megatron_coca.ablation.inputs import InputDigests
from megatron_coca.ablation.prompt_lengths import PromptLengths
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.compare import check_same_model
from megatron_coca.checkpoints.load import source_overrides
from megatron_coca.config import COMPUTE_KEYS, KEYS, Config, ConfigError, load_config, split_inputs
from megatron_coca.config.schema import default_of, not_at_default
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.evaluation.labels import slug
from megatron_coca.evaluation.results import EvaluationError, Record
from megatron_coca.evaluation.suite import (
    Command,
)
from megatron_coca.model.cost import ParameterCount, parameter_count
from megatron_coca.training.corpus import data_not_here, open_corpus
from megatron_coca.training.launch.start import configured_ranks
from megatron_coca.training.sinks import metric_folders
from megatron_coca.training.starting_rate import with_starting_rate
from megatron_coca.training.topology import Topology

RUN_GROUPS = frozenset({"data", "batch", "precision", "parallel", "checkpoint", "logging", "launch"})
RUN_KEYS = COMPUTE_KEYS | {"watchdog_timeout"}
"""Groups and keys that are not part of a cell's name, because they only decide how and where a run is executed. The
content of the data, the batch size and the dtype are still part of the name.
"""


class DataRecord(Record):
    """The training data of a cell: the keys that choose the data, and its content.

    Attributes:
        chosen_by: the group `data` of the configuration, and other keys that determine the samples, as JSON.
        vocab_size: the model's vocabulary size. If the configuration does not set it, it follows from the tokenizer.
        identity: digests of the shards and samples. A resumed run compares them, too. It is empty only in a plan that
            has no access to the data.
    """

    chosen_by: str
    vocab_size: int | None
    identity: dict[str, JsonValue]


@dataclass(frozen=True, eq=False)
class Cell:
    """One model with one seed.

    Attributes:
        name: the name of the cell and of its folders `run` and `results`.
        config: the configuration for megatron-coca train.
        ranks: the number of training processes.
        batch: samples per step, summed over all ranks.
        data: the training data.
        commands: the evaluation commands.
        measurements: a digest of the task's name, the dtype, the options and the variant for each result file, by the
            file's path in `results`.
        inputs: a digest of the files that a task reads, by the path of its result file in `results`.
        start: the cell that trains the initial weights of this cell, or None.
    """

    model: str
    seed: int
    name: str
    config: Config
    ranks: int
    batch: int
    data: DataRecord
    run: Path
    results: Path
    commands: Sequence[Command]
    measurements: Mapping[Path, str]
    inputs: Mapping[Path, str] = field(default_factory=dict)
    start: "Cell | None" = None

    @property
    def steps(self) -> int:
        assert self.config.schedule.train_iters is not None, "`expand` has checked this"
        return self.config.schedule.train_iters

    @cached_property
    def tokens(self) -> int:
        layout, tokens = Topology.of(self.config.parallel, self.ranks), 0
        for stage in self.config.run_stages():
            batch = stage.config.batch.resolve(layout.data).total
            tokens += (stage.last - stage.first) * batch * stage.config.model.seq_length
        return tokens

    @cached_property
    def trained(self) -> Config:
        """The configuration of the trained model."""
        return trained(self.config)

    @cached_property
    def parameters(self) -> ParameterCount:
        return parameter_count(self.trained)


def expand(
    file: AblationFile,
    device: str = "auto",
    dtype: str = "float32",
    recorded: Mapping[str, DataRecord] | None = None,
    absent: list[str] | None = None,
) -> list[Cell]:
    """Return all cells, model by model.

    Raises EvaluationError with a line for every error in the file. If `base` has errors, models are not checked,
    because they depend on it.

    `recorded` contains the data of finished cells by `DataRecord.chosen_by`. With it, a report needs no access to the
    data.

    A plan passes the list `absent`. Data that are missing on this machine are then not prepared and cause no error.
    Instead, a line for them is added to `absent`, and the cell's data record is read from `recorded`. If `recorded` has
    none, the name of the cell has no hash.
    """
    problems = unknown_names(file)
    try:
        base = load_config(*split_inputs(file.base))
    except ConfigError as error:
        raise EvaluationError("\n".join([*problems, *(f"base: {line}" for line in error.problems)])) from error
    cells: list[Cell] = []
    known: dict[str, DataRecord] = dict(recorded or {}) if absent is None else {}
    inputs = InputDigests() if recorded is None or absent is not None else None
    tokenizers: dict[str, Tokenizer | None] = {}
    prompts = PromptLengths(prepare=absent is None)
    for label, entry in file.models.items():
        try:
            config = configured(base, entry)
            model = trained(config)
            plan = partial(commands_of, label, entry, model, device, dtype)
            measured, faults = check_tasks(file, entry, model, dtype, plan, inputs, absent)
            problems += faults
            weights = None if faults else _initial_weights(config)
            if absent is not None and (lines := data_not_here(config)):
                absent += lines
                data = _data_without_reading(config, recorded or {})
            else:
                data = _data_of(config, known, tokenizers)
            if not faults and (tokenizer := tokenizers.get(data.chosen_by)) is not None:
                commands = plan(file.tasks, Path("run"), RESULTS)
                faults = prompts.faults(commands, tokenizer, Path(config.data.data_root))
                problems += faults
            config = config if data.vocab_size is None else config.override({"vocab_size": data.vocab_size})
            if not faults:
                starts = [_start(cells, entry.after, seed) for seed in file.seeds]
                cells += [
                    _cell(file, label, config, seed, data, plan, measured, weights, start)
                    for seed, start in zip(file.seeds, starts, strict=True)
                ]
        except ConfigError as error:
            problems += [f"models.{label}: {line}" for line in error.problems]
        except (CheckpointError, DataError, EvaluationError) as error:
            problems.append(f"models.{label}: {error}")
    names = [cell.name for cell in cells if cell.data.identity]
    for name in sorted({name for name in names if names.count(name) > 1}):
        same = " and ".join(f"{cell.model} with seed {cell.seed}" for cell in cells if cell.name == name)
        problems.append(f"{name}: two cells have this name, {same}; rename one, and name each seed once")
    if problems:
        raise EvaluationError("\n".join(dict.fromkeys(problems)))
    return cells


def configured(base: Config, entry: ModelEntry) -> Config:
    """Return a model's configuration without its seed and folders. Raises ConfigError, EvaluationError."""
    config, _ = with_starting_rate(changed_config(base, entry.set))
    problems = [f"{key}: all cells would write into this folder; remove it" for key in metric_folders(config)]
    set_here = {text.partition("=")[0].strip() for text in entry.set if "=" in text}
    problems += [f"{key}: the command sets it for each cell; remove it" for key in ("seed", "save") if key in set_here]
    if entry.after is not None and config.checkpoint.load is not None:
        problems.append("load: `after` already loads the weights of another model; remove load or after")
    elif "load" in set_here and not config.checkpoint.finetune:
        problems.append("load: a cell can load only initial weights; set finetune=true as well, or remove it")
    needed = {"train_iters": config.schedule.train_iters, "optimizer.params.lr": config.optimizer.lr}
    problems += [f"{key}: not set; training needs it" for key, value in needed.items() if value is None]
    model = trained(config) if config.schedule.train_iters is not None else config
    for variant, changes in entry.variants.items():
        try:
            check_same_model(Path("the model"), model, changed_config(model, changes))
        except ConfigError as error:
            problems += [f"variants.{variant}: {line}" for line in error.problems]
        except CheckpointError as error:
            problems.append(f"variants.{variant}: {error}")
    if problems:
        raise ConfigError(*problems)
    return config


def trained(config: Config) -> Config:
    """Return the configuration of the trained model, which is that of the last stage. Raises ConfigError."""
    return config.run_stages()[-1].config if config.schedule.stages else config


def select(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that `--only` selects by name, model or seed. If models and seeds are named, both must match.

    Raises EvaluationError for an unknown name.
    """
    if not only:
        return list(cells)
    seeds = {f"s{cell.seed}" for cell in cells}
    names = {cell.name for cell in cells} | {cell.model for cell in cells}
    if unknown := [word for word in only if word not in seeds | names]:
        known = [*dict.fromkeys(cell.model for cell in cells), *sorted(seeds), *(cell.name for cell in cells)]
        raise EvaluationError(f"--only {unknown[0]}: unknown; known: {' | '.join(known)}")
    models = {cell.model for cell in cells}
    groups = [chosen for chosen in (models & set(only), seeds & set(only)) if chosen]

    def is_chosen(cell: Cell) -> bool:
        words = {cell.model, f"s{cell.seed}"}
        return cell.name in only or (bool(groups) and all(words & chosen for chosen in groups))

    return [cell for cell in cells if is_chosen(cell)]


def cell_hash(config: Config, batch: int, data: Mapping[str, Any], weights: str | None = None) -> str:
    """Return 8 hexadecimal digits of a hash of everything that determines the trained weights, including the seed.

    Keys at their defaults are left out, so that a new key does not rename earlier cells. `weights` is the identity of
    the initial weights of a run with `finetune`.
    """
    flat = config.flat()
    wanted = (key for key, (group, _) in KEYS.items() if group not in RUN_GROUPS and key not in RUN_KEYS)
    named = not_at_default(wanted, flat)
    data = {name: value for name, value in data.items() if name != "text"}  # not part of earlier versions' cell names
    content = named | {"batch": batch, "dtype": config.precision.dtype, "data": data, "weights": weights}
    return sha256(json.dumps(_without_none(content), sort_keys=True).encode()).hexdigest()[:8]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return value


LATER = frozenset({"pack_impl", "allow_chopped"})
"""Data keys that older records lack. A key at its default is left out, so that older records still match."""


def _chosen_by(config: Config) -> str:
    """Return `DataRecord.chosen_by` for a configuration."""
    flat = config.flat()
    named = [key for key, (group, _) in KEYS.items() if group == "data" and flat[key] is not None]
    keys = {key: flat[key] for key in named if key not in LATER or flat[key] != default_of(key, flat)}
    return json.dumps(keys | {key: flat[key] for key in ("vocab_size", "seq_length")}, sort_keys=True)


def _data_without_reading(config: Config, recorded: Mapping[str, DataRecord]) -> DataRecord:
    """Return the record of the training data from `recorded`, or else a record with an empty `identity`.

    Raises ConfigError if there is no record and the configuration does not set the vocabulary size.
    """
    if (found := recorded.get(chosen_by := _chosen_by(config))) is not None:
        return found
    if config.model.vocab_size is None:
        raise ConfigError(
            "vocab_size: not set, and the training data that determine it are not here; set it, or prepare the data"
        )
    return DataRecord(chosen_by=chosen_by, vocab_size=None, identity={})


def _data_of(config: Config, known: dict[str, DataRecord], tokenizers: dict[str, Tokenizer | None]) -> DataRecord:
    """Return the record of the training data. `known` and `tokenizers` cache records and tokenizers by `chosen_by`."""
    chosen_by = _chosen_by(config)
    if chosen_by not in known:
        corpus = open_corpus(config)
        tokenizers[chosen_by] = corpus.tokenizer
        vocab_size, identity = corpus.config.model.vocab_size, dict(corpus.identity)
        known[chosen_by] = DataRecord(chosen_by=chosen_by, vocab_size=vocab_size, identity=identity)
    return known[chosen_by]


def _initial_weights(config: Config) -> str | None:
    """Return the identity of the initial weights of a run with `finetune`, or None if the weights are random."""
    given = config.checkpoint.load if config.checkpoint.finetune else None
    if given is None:
        return None
    return open_checkpoint(given, False, config.checkpoint.iteration, source_overrides(config)).identity


def _cell(
    file: AblationFile,
    label: str,
    config: Config,
    seed: int,
    data: DataRecord,
    plan: PlanEvaluation,
    measured: Measurements,
    weights: str | None,
    start: Cell | None,
) -> Cell:
    config = config.override({"seed": seed, "load": config.checkpoint.load if config.checkpoint.finetune else None})
    if start is not None:
        config, weights = config.override({"load": str(start.run), "finetune": True}), start.name.rpartition("-")[2]
    ranks = configured_ranks(config.launch)
    batch = config.batch.resolve(Topology.of(config.parallel, ranks).data).total
    name = f"{slug(label)}-s{seed}"
    if data.identity:
        name += f"-{cell_hash(config, batch, data.identity, weights)}"
    run, results = file.runs / name, file.results / name
    commands = plan(file.tasks, run, results)
    config = config.override({"save": str(run)})
    return Cell(label, seed, name, config, ranks, batch, data, run, results, commands, *measured, start)


def _start(cells: Sequence[Cell], model: str | None, seed: int) -> Cell | None:
    """Return the cell of a model with this seed, or None. `unknown_names` reports missing models."""
    return next((cell for cell in cells if (cell.model, cell.seed) == (model, seed)), None)
