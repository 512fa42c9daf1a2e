"""Merge files and overrides into one frozen, validated configuration: `load_config` and `Config`."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import Self

from megatron_coca import methods
from megatron_coca.config.base import ConfigError, ConfigGroup, nearest, shown
from megatron_coca.config.checks import find_faults
from megatron_coca.config.checks.downloaded import faults as downloaded_faults
from megatron_coca.config.checks.downloaded import may_be_downloaded, not_run
from megatron_coca.config.data import TrainingPositions
from megatron_coca.config.metric_sinks import METRIC_SINKS
from megatron_coca.config.neox_keys import (
    ALIAS_VALUES,
    ALIASES,
    HUGGING_FACE,
    INERT,
    MISPLACED,
    UNSUPPORTED,
    UNSUPPORTED_CHOICES,
    is_inert,
)
from megatron_coca.config.position import PositionConfig
from megatron_coca.config.run_stages import RunStage, resolve_stages, stage_faults
from megatron_coca.config.schema import CLOSED, GROUPS, KEYS, MAPPINGS, SECTIONS, SELECTORS, Settings, nested_names
from megatron_coca.config.source import (
    Layer,
    Overrides,
    dump,
    given_layer,
    mapping_layer,
    merge,
    read_file,
    read_overrides,
    yaml_value,
)
from megatron_coca.support.plain_text import masked

EXPECTED: dict[str, str] = {
    "int_type": "expected an integer",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected a string",
    "string_too_short": "expected a path",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "finite_number": "expected a finite number",
}
"""Messages by pydantic error type. All other types keep pydantic's message."""
UNQUOTED: dict[str, tuple[type, ...]] = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}
"""The Python types of a valid value, by pydantic error type, for the hint to remove the quotes of a string."""
SYNONYMS: dict[str, str] = {"bf16": "bfloat16", "float16": "fp16", "float32": "fp32", "rope": "rotary"}
LOSS_SCALING = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
"""Keys of the fp16 section that have no meaning in bfloat16."""
SUFFIXES = (".yml", ".yaml", ".json")
MISSING = "required, but missing"
NO_MODEL = "put it after a model's file, for example `configs/350M/roformer_coca.yml`"
_PLACEHOLDERS = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1}


def known_keys() -> tuple[str, ...]:
    """Return every key that may be set, and `key.name` for mappings with known names."""
    return (*KEYS, *INERT, *ALIASES, *(f"{key}.{name}" for key in KEYS for name in nested_names(key)))


class Problems:
    """Collects errors, which become lines `file:line: key: message`.

    Attributes:
        source: the merged layers.
        found: the location of every error, by the pair of its key and its message. The key may be empty.
        keys: the keys of the schema with errors.
    """

    def __init__(self, source: Layer) -> None:
        self.source = source
        self.found: dict[tuple[str, str], str] = {}
        self.keys: set[str] = set()

    @property
    def lines(self) -> list[str]:
        return [": ".join(filter(None, (where, key, message))) for (key, message), where in self.found.items()]

    def add(self, key: str, message: str) -> None:
        """Add an error about `key`. From then on, messages of checks that read the key are dropped."""
        self.found[key, message] = self._location(key)
        self.keys.add(_owner_of(key))

    def blame(self, layers: Sequence[Layer], faults_of: Callable[[Layer], Collection[tuple[str, str]]]) -> None:
        """If a layer other than the first causes an error, report this layer as the location of the error.

        Without this, an error would be reported for a file even if a key of the command line causes it.
        `source` must be the result of merging `layers`. `faults_of` returns the key and message of every error in a
        given layer.
        """
        rest = dict(self.found)
        for number in range(len(layers) - 1, 0, -1):
            layer = layers[number]
            rest = {fault: where for fault, where in rest.items() if not _within(where, layer)}
            if not rest:
                return
            before = faults_of(merge(layers[:number]))
            for key, message in [fault for fault in rest if fault not in before]:
                self.found[key, message] = _cause(layer, key, rest.pop((key, message)), self.source.label)

    def _location(self, path: str) -> str:
        """Return the location of `path`. If `path` has no location, return the location of a key inside it, or of the
        innermost mapping around it.
        """
        path = path.partition("[")[0]
        where = self.source.where
        inside = (location for key, location in where.items() if key.startswith(f"{path}."))
        around = (where[path[:end]] for end in range(len(path), 0, -1) if path[:end] in where and path[end:][:1] == ".")
        return where.get(path) or next(inside, None) or next(around, self.source.label)

    def add_from_pydantic(self, key: str, errors: Sequence[ErrorDetails]) -> None:
        """Add pydantic's errors about one value as one error with our own message. For a union, pydantic reports
        several errors.
        """
        error = errors[0]
        value, kind = error["input"], error["type"]
        if kind == "missing":
            message = MISSING
        elif kind == "extra_forbidden":
            message = unknown_key(key)
        elif kind == "option":
            message = "; ".join(each["msg"] for each in errors)
        elif kind == "literal_error":
            names = [str(choice) for choice in _choices_of(key)]
            text = value if isinstance(value, str) else shown(value)
            message = f"`{text:.80}` is not one of {' | '.join(names)}{nearest(SYNONYMS.get(text, text), names)}"
        else:
            expected = [EXPECTED.get(each["type"]) or _expectation(each["msg"]) for each in errors]
            hint = ""
            if kind == "int_type" and isinstance(value, float) and value.is_integer():
                hint = f"; write {int(value)}"
            elif isinstance(value, str) and type(yaml_value(value)) in UNQUOTED.get(kind, ()):
                hint = "; remove the quotes"
            elif value == "auto":
                hint = "; leave the key out"
            elif kind == "less_than_equal" and error.get("ctx", {}).get("le") == 1:
                hint = "; the value is a fraction"
            elif key in ("fp16", "bf16"):
                hint = f"; to set only the dtype, use precision={key}"
            message = f"{' or '.join(dict.fromkeys(expected))}, got {shown(value)}{hint}"
        self.add(key, message)


def _within(location: str, layer: Layer) -> bool:
    return location == layer.label or location.startswith(f"{layer.label}:")


def _cause(layer: Layer, key: str, location: str, everywhere: str) -> str:
    """Return the location of an error that `layer` causes. `location` is the location so far. It is the place of `key`
    in an earlier layer, or `everywhere` if no layer has the key.
    """
    inside = (where for path, where in layer.where.items() if path.startswith(f"{key}."))
    return next(inside, layer.label if location == everywhere else f"{layer.label}, with {location}")


def _expectation(message: str) -> str:
    """Reword pydantic's message, such as `Input should be greater than 0`, or `Input should be 'auto'` in a union."""
    expected = message.removeprefix("Input should be ")
    return expected.replace("'", "`") if expected.startswith("'") else f"expected a value {expected}"


def unknown_key(key: str) -> str:
    """Return the message about an unknown key. The hint is our key with the same meaning if the key is a Hugging Face
    name, otherwise the closest known key. If no known name of a mapping is close, the hint lists all of them.
    """
    if key in MISPLACED:
        return MISPLACED[key]
    if meant := HUGGING_FACE.get(key):
        return f"unknown key; did you mean `{meant}`?"
    mapping, _, name = key.rpartition(".")
    if names := nested_names(_of_model(mapping)):
        return f"unknown key{nearest(name, names, f'{mapping}.') or '; use one of ' + ' | '.join(names)}"
    return f"unknown key{nearest(key, known_keys())}"


def _of_model(key: str) -> str:
    """Return a key of a layer type as a key of the model."""
    return key.split(".", 2)[2] if key.startswith("layer_types.") and key.count(".") > 1 else key


def _owner_of(path: str) -> str:
    """Return the key of the schema that a path such as `rope_scaling.factor` or `a[0]` belongs to."""
    path = path.partition("[")[0]
    owner = path
    while owner not in KEYS and "." in owner:
        owner = owner.rpartition(".")[0]
    return owner if owner in KEYS else path


def _path_of(error: ErrorDetails, values: Any) -> str:
    """Return the dotted path of the invalid value within `values`, without the members of unions."""
    path = ""
    for part in error["loc"]:
        try:
            values = values[part]
        except (LookupError, TypeError):
            if error["type"] != "missing":
                continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _choices_of(key: str) -> tuple[Any, ...]:
    """Return the choices of a key, of a name in a mapping such as `rope_scaling.rope_type`, or of a list item."""
    key = _of_model(key)
    owner, option = _owner_of(key), key.partition("[")[0].rpartition(".")[2]
    owner = "pos_emb" if owner == "pos_emb_options" else owner
    if owner in methods.TABLES and option in (owner, SELECTORS.get(owner)):
        return tuple(methods.TABLES[owner])
    if owner in methods.TABLES:
        declared = (choice.option(option) for choice in methods.TABLES[owner].values())
        return next((each.choices for each in declared if each is not None), ())
    if owner in MAPPINGS:
        return literal_values(MAPPINGS[owner].model_fields[option].annotation)
    annotation: Any = GROUPS[KEYS[owner].group].model_fields[KEYS[owner].field].annotation
    return literal_values(annotation)


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a Literal, even inside a union or an Annotated; empty for other types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return tuple(value for kind in inner for value in literal_values(kind))


def validate(source: Layer) -> tuple[dict[str, ConfigGroup], Problems]:
    """Return the key groups by name, and all errors. Invalid keys have their defaults in the groups."""
    problems = Problems(source)
    flat = _flatten(source.values, "", problems)
    _resolve_aliases(flat, problems)
    _translate_fp16(flat, problems)
    known = _known_values(flat, problems)
    _run_imports(known, problems)
    absent = {key: value for key, value in _PLACEHOLDERS.items() if key not in known}
    if len(absent) > 2:  # an overlay: most checks would compare its keys with keys of a missing model
        problems.found["", f"describes no model ({', '.join(absent)} missing); {NO_MODEL}"] = source.label
        return {name: _group(name, kind, absent | known, problems) for name, kind in GROUPS.items()}, problems
    groups = {name: _group(name, kind, known, problems) for name, kind in GROUPS.items()}
    for key, message in find_faults(Settings.model_validate(groups), frozenset(problems.keys)):
        problems.add(key, message)
    return groups, problems


def _flatten(values: Mapping[str, Any], path: str, problems: Problems) -> dict[str, Any]:
    """Return the values by dotted path, to the depth of the schema's keys, without nulls in mappings of known names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= _flatten(value, key, problems)
        elif key in SECTIONS and value is not None:
            problems.add(key, f"expected a mapping, got {shown(value)}")
        elif key in CLOSED and isinstance(value, Mapping):
            flat[key] = {inner: item for inner, item in value.items() if item is not None}
        elif key not in SECTIONS:
            flat[key] = value
    return flat


def _resolve_aliases(flat: dict[str, Any], problems: Problems) -> None:
    """Move the values of aliases to their keys. Add an error for every alias that contradicts its key."""
    for alias in [alias for alias in ALIASES if alias in flat]:
        value, choices, target = flat.pop(alias), ALIAS_VALUES.get(alias), ALIASES[alias]
        if value is None:
            continue
        if choices is not None:
            if not isinstance(value, bool):
                problems.add(alias, f"expected true or false, got {shown(value)}")
                continue
            value = choices[value]
        mapping, name = flat, target
        if target not in KEYS:
            key, name = target.split(".")
            outer = flat.get(key)
            flat[key] = {} if outer is None else dict(outer) if isinstance(outer, Mapping) else outer
            mapping = flat[key]
        if value is None or not isinstance(mapping, dict):
            continue
        current = mapping.get(name)
        both_text = isinstance(current, str) and isinstance(value, str)
        if current is None:
            mapping[name] = value
            problems.source.where[target] = problems.source.where.get(alias, problems.source.label)
        elif current.lower() != value.lower() if both_text else current != value:
            problems.add(alias, f"{value!s:.80} contradicts {target} {current!s:.80}; set only {target}")


def _translate_fp16(flat: dict[str, Any], problems: Problems) -> None:
    """Translate GPT-NeoX's names in the fp16 and bf16 sections.

    `fp16.fp16` and `bf16.bf16` are redundant. `fp16.type: bfloat16` means the bf16 section. A bf16 section that was
    copied from an fp16 section has keys of loss scaling, which bfloat16 does not use.
    """
    section = flat.get("bf16")
    if isinstance(section, dict):
        for name in ("bf16", *LOSS_SCALING):
            section.pop(name, None)
    section = flat.get("fp16")
    if not isinstance(section, dict):
        return
    section.pop("fp16", None)
    kind = section.pop("type", "fp16")
    if kind not in ("fp16", "bfloat16"):
        problems.add("fp16.type", f"`{kind!s:.80}` is not one of fp16 | bfloat16")
    if kind == "bfloat16":
        enabled = {"enabled": True} if section.get("enabled") is True else {}
        flat["fp16"] = None
        flat["bf16"] = enabled | (flat.get("bf16") or {})


def _known_values(flat: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the schema's keys that are set. Add an error for every unknown key and every unsupported feature."""
    known: dict[str, Any] = {}
    for key, value in flat.items():
        choice = value.lower() if isinstance(value, str) else value
        hashable = isinstance(choice, str | bool)
        if key in UNSUPPORTED:
            default, feature = UNSUPPORTED[key]
            if not is_inert(value, default):
                problems.add(key, f"{feature} is not supported; leave the key out")
        elif key not in KEYS and key not in INERT:
            problems.add(key, unknown_key(key))
        elif hashable and choice in UNSUPPORTED_CHOICES.get(key, {}):
            names = [str(name) for name in _choices_of(key)]
            choices = f" ({' | '.join(names)})" if names else ""
            problems.add(key, f"`{value}`: {UNSUPPORTED_CHOICES[key][choice]} is not supported{choices}")
        elif key in KEYS and value is not None:
            if value == "None" and not _choices_of(key):
                problems.add(key, "`None` is a text in YAML; write null, or leave the key out")
            else:
                known[key] = _unquoted_word(key, value) if isinstance(value, bool) else value
    return known


def _unquoted_word(key: str, value: bool) -> Any:
    """Return the choice of the key that YAML reads as the boolean `value`, such as an unquoted `off`. If the key has no
    such choice, return `value`.
    """
    choices = () if key in MAPPINGS else _choices_of(key)
    words = [choice for choice in choices if isinstance(choice, str) and yaml_value(choice) is value]
    return words[0] if words else value


def _run_imports(known: dict[str, Any], problems: Problems) -> None:
    """Run the files that declare position methods and sinks, because validation needs their declarations.

    Each name in `imports` becomes an absolute path, with a digest of the file's contents if it declares methods.
    """
    names = known.get("imports")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return  # validation reports the error
    file = problems.source.where.get("imports", "").rpartition(":")[0]
    folder = Path(file).parent if file and os.path.isfile(file) else Path()
    if file and names and may_be_downloaded(Path(file)):
        problems.add("imports", not_run(names))
        return
    try:
        known["imports"] = [methods.import_file(os.path.expanduser(name), folder) for name in names]
    except methods.ImportedFileError as error:
        problems.add("imports", str(error))


def _group(name: str, kind: type[ConfigGroup], known: dict[str, Any], problems: Problems) -> ConfigGroup:
    """Build one key group. Invalid keys are added to `problems` and have their defaults in the group."""
    values = {key: value for key, value in known.items() if KEYS[key].group == name}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        errors = [details for details in error.errors() if details["type"] != "default_factory_not_called"]
    by_path: dict[str, list[ErrorDetails]] = {}
    for details in errors:
        by_path.setdefault(_path_of(details, values), []).append(details)
    for path, same in by_path.items():
        problems.add_from_pydantic(path, same)
    invalid = {_owner_of(path) for path in by_path}
    valid = {key: value for key, value in values.items() if key not in invalid}
    placeholders = {key: value for key, value in _PLACEHOLDERS.items() if KEYS[key].group == name}
    return kind.model_validate(placeholders | valid)


class Config(Settings):
    """A resolved configuration: frozen groups of typed values."""

    @property
    def seed(self) -> int:
        """Seed of initialization, dropout and data order."""
        return self.general.seed

    @property
    def layer_types(self) -> dict[str, PositionConfig]:
        """Position keys of every layer type, in the order in which the types first occur."""
        return self.position.of_types(self.model.layer_names)

    @property
    def training_positions(self) -> TrainingPositions | None:
        """Positions of training samples; None for 0, 1, ... A learned extension (CLEX) defaults to `stretched`."""
        given, types = self.general.training_positions, self.layer_types.values()
        factors = [kind.rope_scaling.max_factor for kind in types if kind.rope_scaling and kind.extension.learned]
        stretched = TrainingPositions(type="stretched", max=f"{max(factors)}L") if factors else None
        return given if given is not None else stretched

    @property
    def gpu_keys(self) -> tuple[str, ...]:
        """The keys that need GPUs: `distributed_backend: nccl`, `num_gpus` unless the backend is gloo, fp16, and
        `cuda_graphs`.
        """
        backend, counted = self.parallel.distributed_backend, self.launch.num_gpus is not None
        devices = ["num_gpus" if counted else "distributed_backend"] * (
            backend == "nccl" or (backend is None and counted)
        )
        others = {"precision": self.precision.dtype == "fp16", "cuda_graphs": self.parallel.cuda_graphs}
        return (*devices, *(key for key, needed in others.items() if needed))

    def override(self, overrides: Overrides, files: Sequence[str | Path] = ()) -> Self:
        """Return a validated copy with some keys changed.

        A key that was not set and defaults to another key (num_kv_heads, max_position_embeddings) still follows
        that key.

        Args:
            overrides: see `load_config`.
            files: YAML files that are merged before the overrides.

        Raises:
            ConfigError: the result is not valid.
        """
        problems: list[str] = []
        own = Layer("configuration", self._nested(only_set=True), {})
        layers = [layer for file in files if (layer := read_file(file, problems)) is not None]
        return self.from_layers([own, *layers, *read_overrides(overrides, problems)], problems)

    def run_stages(self) -> list[RunStage[Self]]:
        """Return the stages of the run; without `stages`, one stage with this configuration."""
        return resolve_stages(self, self.override)

    def to_yaml(self) -> str:
        """Return every key with its resolved value as YAML. `load_config` reads it back as an equal Config."""
        return dump(self._nested(only_set=False))

    def record(self) -> str:
        """Return the text of `to_yaml` for the folder of a checkpoint. It has no passwords, no `metric_sinks` and no
        files that declare only sinks, because other people may read a checkpoint.
        """
        values = self._nested(only_set=False)
        del values[METRIC_SINKS]
        values["imports"] = [name for name in values["imports"] if methods.MARK in name]
        return masked(dump(values))

    def flat(self) -> dict[str, Any]:
        """Return every resolved value by its dotted key, for example `num_layers` or `optimizer.params.lr`."""
        return {
            path: value
            for name in type(self).model_fields
            for path, value in getattr(self, name).model_dump(by_alias=True).items()
        }

    def _nested(self, only_set: bool) -> dict[str, Any]:
        """Return the values as they are nested in YAML, without group names."""
        values: dict[str, Any] = {}
        for name in type(self).model_fields:
            group: ConfigGroup = getattr(self, name)
            for path, value in group.model_dump(by_alias=True, exclude_unset=only_set).items():
                *parents, last = path.split(".")
                inner = values
                for parent in parents:
                    inner = inner.setdefault(parent, {})
                inner[last] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def from_layers(cls, layers: Sequence[Layer], problems: list[str], used: bool = True) -> Self:
        """Merge layers and validate the result. Raises ConfigError with `problems` and all further errors.

        `used` is false for the configuration of a checkpoint, which may name addresses and folders of another computer.
        """
        config, found = cls._resolve(merge(layers), used)
        found.blame(layers, lambda source: cls._resolve(source, used, staged=config is not None)[1].found)
        if config is None or problems or found.found:
            raise ConfigError(*problems, *found.lines)
        return config

    @classmethod
    def _resolve(cls, source: Layer, used: bool, staged: bool = True) -> tuple[Self | None, Problems]:
        """Return the configuration and all errors. The configuration is None if there are errors outside `stages`. The
        stages are only checked if `staged` is set.
        """
        groups, problems = validate(source)
        for key, message in downloaded_faults(source.values, source.where) if used else ():
            problems.add(key, message)
        if problems.found:
            return None, problems
        config = cls.model_validate(groups)
        for key, message in stage_faults(config, config.override) if staged and config.schedule.stages else ():
            problems.add(key, message)
        return config, problems


Source = str | Path | Mapping[str, Any]
"""A YAML or JSON file, or a mapping of keys to values."""


def load_config(sources: Source | Sequence[Source], overrides: Overrides = ()) -> Config:
    """Merge files and mappings left to right, then overrides, and validate the result.

    Args:
        sources: one or more files or mappings. Later values win, mappings are merged key by key, and null (None) means
            "not set".
        overrides: a mapping of dotted keys to values, or strings `key=value` with values in YAML.

    Returns:
        The configuration. Hyphens and underscores in keys are equivalent.

    Raises:
        ConfigError: all errors of all files and overrides.
    """
    problems: list[str] = []
    several = [sources] if isinstance(sources, str | Path | Mapping) else sources
    read = [mapping_layer(each) if isinstance(each, Mapping) else read_file(each, problems) for each in several]
    layers = [layer for layer in read if layer is not None] + read_overrides(overrides, problems)
    if None in read:  # a missing key may be in the file that cannot be read
        _, found = validate(merge(layers))
        raise ConfigError(*problems, *(line for line in found.lines if not line.endswith((MISSING, NO_MODEL))))
    return Config.from_layers(layers, problems)


def keys_without_effect(paths: Sequence[str | Path], overrides: Overrides = ()) -> list[str]:
    """List settings without effect: GPT-NeoX keys, and options of a position choice that a later file replaces."""
    given = given_layer(overrides, paths)
    return [*sorted(given.values.keys() & INERT.keys()), *given.dropped]


def split_inputs(inputs: Sequence[str], folder: str | None = None) -> tuple[list[str], list[str]]:
    """Divide the inputs of a command line into configuration files and `key=value` overrides.

    As in GPT-NeoX, file names are relative to `folder` if it is given, and need no `.yml`, for example `125M`.
    """
    names = [os.path.join(folder or "", text) for text in inputs if "=" not in text]
    return [_with_suffix(name) for name in names], [text for text in inputs if "=" in text]


def _with_suffix(name: str) -> str:
    named = f"{name}.yml"
    return name if name.endswith(SUFFIXES) or (os.path.exists(name) and not os.path.exists(named)) else named
