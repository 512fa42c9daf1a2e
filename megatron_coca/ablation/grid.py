"""The ablation file and its cells. A cell is one training run with its evaluations."""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, FiniteFloat, JsonValue, field_validator, model_validator

from megatron_coca.ablation.inputs import InputDigests
from megatron_coca.ablation.prompt_lengths import PromptLengths
from megatron_coca.checkpoints import CheckpointError, open_checkpoint
from megatron_coca.checkpoints.compare import check_same_model
from megatron_coca.config import COMPUTE_KEYS, KEYS, Config, ConfigError, load_config, split_inputs
from megatron_coca.config.schema import default_of
from megatron_coca.data import DataError, Tokenizer
from megatron_coca.evaluation.documents import find_sources
from megatron_coca.evaluation.labels import full_label, slug
from megatron_coca.evaluation.multiples import changes_in_tokens
from megatron_coca.evaluation.options import subject_options
from megatron_coca.evaluation.results import EvaluationError, Record, read_yaml_file, validated
from megatron_coca.evaluation.suite import (
    CheckpointEntry,
    Command,
    SuiteFile,
    TextList,
    check_variants,
    option_arguments,
    plan_commands,
    task_parser,
    task_variants,
)
from megatron_coca.model.cost import ParameterCount, parameter_count
from megatron_coca.support.plain_text import masked
from megatron_coca.support.remote_files import is_url
from megatron_coca.training.corpus import data_not_here, open_corpus
from megatron_coca.training.launch.start import configured_ranks
from megatron_coca.training.sinks import metric_folders
from megatron_coca.training.starting_rate import with_starting_rate
from megatron_coca.training.topology import Topology

Plan = Callable[[Mapping[str, dict[str, Any] | None], Path, Path], list[Command]]
"""A function that returns a model's evaluation commands for given tasks, a run folder and a results folder."""

RUN_GROUPS = frozenset({"data", "batch", "precision", "parallel", "checkpoint", "logging", "launch"})
RUN_KEYS = COMPUTE_KEYS | {"watchdog_timeout"}
"""Groups and keys that are not part of a cell's name, because they only decide how and where a run is executed. The
name does cover the content of the data, the batch size and the dtype.
"""
HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which a leading `~` means the home folder."""
RESULTS = Path("results")


class ModelEntry(Record):
    """A model in the file.

    Attributes:
        set: YAML files and keys that are applied after those of `base`.
        variants: the variants to evaluate.
        after: another model of the file, above this one. Training starts with the weights that it has with the same
            seed, as `finetune` does.
    """

    set: TextList = []
    variants: dict[str, TextList | None] = {"": None}
    after: str | None = None


class DataRecord(Record):
    """The training data of a cell: the keys that choose the data, and its content.

    Attributes:
        chosen_by: the group `data` of the configuration, and other keys that determine the samples, as JSON.
        vocab_size: the model's vocabulary size; set by the tokenizer if the configuration does not set it.
        identity: digests of the shards and samples; resuming compares them too. Empty only in a plan without the data.
    """

    chosen_by: str
    vocab_size: int | None
    identity: dict[str, JsonValue]


class DeclaredContrast(Record):
    """A comparison that a file declares before its runs: of two labels, or a weighted sum over labels.

    Attributes:
        label, other: the two labels; the difference is the first minus the second.
        weights: instead of the two, a weight for each label, such as 1, -1, -1, 1 for a difference of differences.
            Their sum is 0, so that equal labels give 0.
        title: the words for a weighted sum, as in "CoCA minus RoFormer, per factor of e in parameters".
        at: the length as a multiple of the training length.
        quantity: "recall" (accuracy, compared by differences), "recall PART" for a part of the questions (see
            `Figures.accuracies`), or a quantity of perplexity (compared by ratios).
        expected: the mean difference for which the power is computed; for perplexities, of logarithms.
        deviation: the standard deviation of the difference over seeds, known from earlier runs.
    """

    label: str = ""
    other: str = ""
    weights: dict[str, FiniteFloat] = {}
    title: str = ""
    at: float = 1
    quantity: str = "recall"
    expected: float | None = None
    deviation: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _two_labels_or_weights(self) -> Self:
        pair, weighted = (bool(self.label), bool(self.other)), (bool(self.weights), bool(self.title))
        if (pair, weighted) not in (((True, True), (False, False)), ((False, False), (True, True))):
            raise ValueError("label and other, or weights and title: set one of these pairs, and all of it")
        size = sum(map(abs, self.weights.values()))
        if self.weights and (not size or abs(sum(self.weights.values())) > 1e-6 * size):
            raise ValueError("weights: a contrast needs weights that are not all 0 and whose sum is 0; change them")
        return self

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.expected is None) != (self.deviation is None):
            raise ValueError("expected and deviation: only one of them is set; set both, or neither")
        return self

    @property
    def is_recall(self) -> bool:
        """True for accuracies, which are compared by differences; False for perplexities."""
        return self.quantity.partition(" ")[0] == "recall"

    @property
    def terms(self) -> dict[str, float]:
        """The weight of each label. The difference is the sum of weights times values."""
        return {**self.weights} or {self.label: 1.0, self.other: -1.0}

    @property
    def sides(self) -> str:
        """What is compared, without quantity and length."""
        return self.title or f"{self.label} against {self.other}"

    @property
    def name(self) -> str:
        return f"{self.sides}, {self.quantity} at {self.at:g}L"


class AblationFile(Record):
    """An ablation; see docs/ablations.md. `tasks` are written as in a suite.

    Attributes:
        testing: how `contrasts` are tested. "together" corrects all p-values and intervals for the number of contrasts
            (Holm). In a "sequence", the first contrast is the primary one, and each is tested at 5% only if all before
            it hold.
    """

    title: str
    base: TextList = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)
    baseline: str | None = None
    results: HomePath
    runs: HomePath
    models: dict[str, ModelEntry] = Field(min_length=1)
    tasks: dict[str, dict[str, Any] | None] = Field(min_length=1)
    contrasts: list[DeclaredContrast] = []
    testing: Literal["together", "sequence"] = "together"

    @model_validator(mode="after")
    def _testable(self) -> Self:
        if self.testing == "sequence" and (not self.contrasts or len(self.seeds) < 2):
            raise ValueError("testing: a sequence needs contrasts and at least two seeds; declare them")
        return self

    @field_validator("models", mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: {"set": entry} if isinstance(entry, list | str) else entry or {} for name, entry in given.items()}


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
        measurements: for each result file, by its path in `results`, a digest of the task's name, the dtype, the
            options and the variant.
        inputs: for each result file of a task that reads files, a digest of these files.
        start: the cell whose trained weights this one starts with.
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


def read_ablation(
    path: Path, scale: str | None = None, results: Path | None = None, runs: Path | None = None
) -> AblationFile:
    """Read and validate a file at one of its scales (None: the first); `results` and `runs` override its folders.

    Raises EvaluationError.
    """
    content = read_yaml_file(path)
    if isinstance(content, Mapping):
        scales = content.get("scales") or {}
        if not isinstance(scales, Mapping) or (scale is not None and scale not in scales):
            known = ", ".join(map(str, scales)) or "none"
            raise EvaluationError(f"{path}: --scale {scale}: unknown; known scales: {known}")
        name = scale or next(iter(scales), None)
        chosen = scales[name] if name is not None else {}
        if not isinstance(chosen, Mapping):
            raise EvaluationError(f"{path}: scales.{name}: must be a mapping of keys to values")
        folders = {"results": results, "runs": runs}
        content = _merged({key: value for key, value in content.items() if key != "scales"}, chosen)
        content |= {key: folder for key, folder in folders.items() if folder is not None}
    return validated(path, content, AblationFile, "an ablation")


def _merged(first: Any, second: Any) -> Any:
    """Merge two mappings key by key; for values that are not mappings, return the second."""
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return second
    return {**first, **{key: _merged(first.get(key), value) for key, value in second.items()}}


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

    `recorded` contains the data of finished cells by `DataRecord.chosen_by`, for a report without access to the data.

    With the list `absent`, for a plan, data that are not on this machine are no error and are not prepared: a line for
    each is added to the list. The data of such a cell are those of `recorded`; if it has none, the cell's name has no
    hash.
    """
    problems = _unknown_names(file)
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
            plan = partial(_commands, label, entry, model, device, dtype)
            measured, faults = _check_tasks(file, entry, model, dtype, plan, inputs, absent)
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


def _unknown_names(file: AblationFile) -> list[str]:
    """Return a line for every model, label and variant that the file names but does not define."""
    problems = []
    if file.baseline is not None and file.baseline not in file.models:
        problems.append(f"baseline: {file.baseline}: unknown; known models: {' | '.join(file.models)}")
    elif file.baseline is not None and "" not in file.models[file.baseline].variants:
        problems.append(f'baseline: {file.baseline}: has no variant "", the reference for comparisons; add it')
    above: list[str] = []
    for model, entry in file.models.items():
        if entry.after is not None and entry.after not in above:
            problems.append(
                f"models.{model}: after: {entry.after}: no model above it; known: {' | '.join(above) or 'none'}"
            )
        above.append(model)
    labels = {full_label(model, variant) for model, entry in file.models.items() for variant in entry.variants}
    for contrast in file.contrasts:
        problems += [
            f"contrasts: {name}: unknown; known labels: {' | '.join(labels)}"
            for name in contrast.terms
            if name not in labels
        ]
    try:
        check_variants(file.tasks, (entry.variants for entry in file.models.values()))
    except EvaluationError as error:
        problems.append(str(error))
    return problems


def configured(base: Config, entry: ModelEntry) -> Config:
    """Return a model's configuration without its seed and folders. Raises ConfigError, EvaluationError."""
    config, _ = with_starting_rate(_changed(base, entry.set))
    problems = [f"{key}: all cells would write into this folder; remove it" for key in metric_folders(config)]
    set_here = {text.partition("=")[0].strip() for text in entry.set if "=" in text}
    problems += [f"{key}: set separately for every cell; remove it" for key in ("seed", "save") if key in set_here]
    if entry.after is not None and config.checkpoint.load is not None:
        problems.append("load: the weights of the model in `after` are loaded; remove one of the two")
    elif "load" in set_here and not config.checkpoint.finetune:
        problems.append("load: a cell can load only initial weights; set finetune=true as well, or remove it")
    needed = {"train_iters": config.schedule.train_iters, "optimizer.params.lr": config.optimizer.lr}
    problems += [f"{key}: not set; training needs it" for key, value in needed.items() if value is None]
    model = trained(config) if config.schedule.train_iters is not None else config
    for variant, changes in entry.variants.items():
        try:
            check_same_model(Path("the model"), model, _changed(model, changes))
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
    named = {
        key: flat[key]
        for key, (group, _) in KEYS.items()
        if group not in RUN_GROUPS and key not in RUN_KEYS and flat[key] != default_of(key, flat)
    }
    data = {name: value for name, value in data.items() if name != "text"}  # not part of earlier versions' cell names
    content = named | {"batch": batch, "dtype": config.precision.dtype, "data": data, "weights": weights}
    return sha256(json.dumps(_without_none(content), sort_keys=True).encode()).hexdigest()[:8]


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return value


LATER = frozenset({"pack_impl", "allow_chopped"})
"""Data keys that older records lack. They are left out at their defaults, so that older records still match."""


def _chosen_by(config: Config) -> str:
    """Return the keys that choose the data, as in `DataRecord`."""
    flat = config.flat()
    named = [key for key, (group, _) in KEYS.items() if group == "data" and flat[key] is not None]
    keys = {key: flat[key] for key in named if key not in LATER or flat[key] != default_of(key, flat)}
    return json.dumps(keys | {key: flat[key] for key in ("vocab_size", "seq_length")}, sort_keys=True)


def _data_without_reading(config: Config, recorded: Mapping[str, DataRecord]) -> DataRecord:
    """Return the recorded training data or, without a record, one that identifies nothing.

    Raises ConfigError if only the data could tell the vocabulary size.
    """
    if (found := recorded.get(chosen_by := _chosen_by(config))) is not None:
        return found
    if config.model.vocab_size is None:
        raise ConfigError(
            "vocab_size: not set, and the training data that would tell it are not here; set it, or prepare the data"
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


def _changed(config: Config, changes: Sequence[str] | None) -> Config:
    files, keys = split_inputs(changes_in_tokens(changes or [], config.model.seq_length))
    return config.override(keys, files)


class Measurements(NamedTuple):
    """Digests by result file, as in `Cell`."""

    options: dict[Path, str]
    inputs: dict[Path, str]


def _check_tasks(
    file: AblationFile,
    entry: ModelEntry,
    config: Config,
    dtype: str,
    plan: Plan,
    inputs: InputDigests | None,
    absent: list[str] | None,
) -> tuple[Measurements, list[str]]:
    """Return the digests of all result files, and a line for each task that `megatron-coca evaluate` would not accept.

    If `inputs` is None, the data is not read. A line for data that cannot be read is added to the list `absent`, if
    there is one.
    """
    problems, found, own = [], Measurements({}, {}), config.flat()
    flat = {name: _changed(config, changes).flat() for name, changes in entry.variants.items()}
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
    """Return a digest of the files that a `megatron-coca evaluate` command reads; None without files or `inputs`.

    Raises EvaluationError or DataError for the errors that the command would raise before it loads a model. If there is
    a list `absent`, those of its data are added to it instead, and nothing is fetched from a store.
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


def _commands(
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
    own += [f"test_data_paths={json.dumps(paths)}"] if any(map(is_url, paths)) else []  # likewise for addresses
    checkpoint = CheckpointEntry(path=str(run), variants=entry.variants, set=own)
    suite = SuiteFile(title="", checkpoints={label: checkpoint}, tasks=dict(tasks))
    return plan_commands(suite, {label: config.model.seq_length}, results, device, dtype)


def _initial_weights(config: Config) -> str | None:
    """Return the identity of the initial weights of a run with `finetune`; None if the weights are drawn."""
    given = config.checkpoint.load if config.checkpoint.finetune else None
    if given is None:
        return None
    own = {"imports": config.position.imports, "ignore_keys": config.checkpoint.ignore_keys}
    return open_checkpoint(given, False, config.checkpoint.iteration, overrides=own).identity


def _cell(
    file: AblationFile,
    label: str,
    config: Config,
    seed: int,
    data: DataRecord,
    plan: Plan,
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
    """Return the cell of a model with this seed; None if there is none, for which `_unknown_names` has a line."""
    return next((cell for cell in cells if (cell.model, cell.seed) == (model, seed)), None)
