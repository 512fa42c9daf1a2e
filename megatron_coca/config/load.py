"""`load_config`: files and overrides to one frozen, validated Config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import Self

from megatron_coca.config.base import ConfigError, ConfigGroup, nearest
from megatron_coca.config.checks import find_faults
from megatron_coca.config.neox_keys import (
    ALIAS_VALUES,
    ALIASES,
    INERT,
    MISPLACED,
    UNSUPPORTED,
    UNSUPPORTED_CHOICES,
    is_inert,
)
from megatron_coca.config.schema import CLOSED, GROUPS, KEYS, NESTED, SECTIONS, Settings
from megatron_coca.config.source import Layer, merge, read_file, read_overrides
from megatron_coca.config.yaml_text import dump

EXPECTED: dict[str, str] = {
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "list_type": "expected a list",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "finite_number": "expected a finite number",
}
SYNONYMS: dict[str, str] = {"bf16": "bfloat16", "float16": "fp16", "float32": "fp32", "rope": "rotary"}
KNOWN = (*KEYS, *INERT, *ALIASES, *(f"{key}.{name}" for key, names in NESTED.items() for name in names))


class Problems:
    """Lines of the form `place: key: message`."""

    def __init__(self, source: Layer) -> None:
        self.source = source
        self.lines: list[str] = []
        self.keys: set[str] = set()

    def add(self, key: str, message: str) -> None:
        """Record a fault of `key`, which is unreliable from then on."""
        self.lines.append(f"{self._place(key)}: {key}: {message}")
        self.keys.add(owner_of(key))

    def _place(self, path: str) -> str:
        """Where `path` was written, else a name inside it, else the mapping around it."""
        path = path.partition("[")[0]
        where = self.source.where
        inside = (place for written, place in where.items() if written.startswith(f"{path}."))
        around = (where[path[:end]] for end in range(len(path), 0, -1) if path[:end] in where and path[end:][:1] == ".")
        return where.get(path) or next(inside, None) or next(around, self.source.label)


def owner_of(path: str) -> str:
    """The key of the schema to which a path such as `rope_scaling.factor` or `a[0]` belongs."""
    path = path.partition("[")[0]
    return path if path in KEYS else path.rpartition(".")[0] if "." in path else path


def path_of(fault: ErrorDetails) -> str:
    """The dotted path of the value that pydantic refuses."""
    first, *rest = fault["loc"]
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)


def report(fault: ErrorDetails, problems: Problems) -> None:
    """Add pydantic's finding to `problems` in our words."""
    key, value, kind = path_of(fault), fault["input"], fault["type"]
    if kind == "missing":
        problems.add(key, "required, but missing")
    elif kind == "extra_forbidden":
        problems.add(key, f"unknown key{nearest(key, KNOWN)}")
    elif kind == "literal_error":
        names = [str(choice) for choice in choices_of(key)]
        problems.add(
            key, f"`{value}` is not one of {' | '.join(names)}{nearest(SYNONYMS.get(str(value), str(value)), names)}"
        )
    else:
        message = EXPECTED.get(kind) or fault["msg"].replace("Input should be", "expected a value")
        problems.add(key, f"{message}, got {value!r}{_hint(kind, value)}")


def _hint(kind: str, value: Any) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    return "; remove the quotes" if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type") else ""


def choices_of(key: str) -> tuple[Any, ...]:
    """The choices of a key, also of one inside a mapping such as `rope_scaling.rope_type`, or of an item of a list."""
    owner = owner_of(key)
    annotation: Any = GROUPS[KEYS[owner].group].model_fields[KEYS[owner].field].annotation
    if "." in key.removeprefix(owner):
        nested = next(kind for kind in get_args(annotation) if kind is not type(None))
        annotation = nested.model_fields[key.rpartition(".")[2]].annotation
    return leaves(annotation)


def leaves(annotation: Any) -> tuple[Any, ...]:
    """The values of a Literal, also of one inside a union or an Annotated; of anything else none."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return tuple(value for part in parts for value in leaves(part))


_PLACEHOLDERS = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1}


def validate(source: Layer) -> tuple[dict[str, ConfigGroup], list[str]]:
    """The groups by name and the problems. The groups are complete only where there are no problems."""
    problems = Problems(source)
    flat = _flatten(source.values, "", problems)
    _resolve_aliases(flat, problems)
    _translate_fp16(flat, problems)
    known = _known_values(flat, problems)
    groups = {name: _group(name, kind, known, problems) for name, kind in GROUPS.items()}
    unreliable = problems.keys | ({"num_kv_heads"} if "num_attention_heads" in problems.keys else set())
    unreliable |= {"max_position_embeddings"} if "seq_length" in problems.keys else set()
    for key, fault in find_faults(Settings.model_validate(groups), frozenset(unreliable)):
        problems.add(key, fault)
    return groups, problems.lines


def _flatten(values: Mapping[str, Any], path: str, problems: Problems) -> dict[str, Any]:
    """Values by dotted path, down to the keys of the schema. Nulls in mappings of ours mean `not set`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{path}.{name}" if path else name
        if key in SECTIONS and isinstance(value, Mapping):
            flat |= _flatten(value, key, problems)
        elif key in SECTIONS and value is not None:
            problems.add(key, f"expected a mapping, got {value!r}")
        elif key not in SECTIONS:
            flat[key] = value
    return {key: _without_nulls(key, value) for key, value in flat.items()}


def _without_nulls(key: str, value: Any) -> Any:
    if key not in CLOSED or not isinstance(value, Mapping):
        return value
    return {name: inner for name, inner in value.items() if inner is not None}


def _resolve_aliases(flat: dict[str, Any], problems: Problems) -> None:
    """Move values of second names to the first, refusing those that disagree."""
    for alias in [alias for alias in ALIASES if alias in flat]:
        value = flat.pop(alias)
        choices = ALIAS_VALUES.get(alias)
        if choices is not None and value is not None and not isinstance(value, bool):
            problems.add(alias, f"expected true or false, got {value!r}")
        elif value is not None:
            _move(alias, choices[value] if choices else value, flat, problems)


def _move(alias: str, value: Any, flat: dict[str, Any], problems: Problems) -> None:
    target = ALIASES[alias]
    key, inner = (target, "") if target in KEYS else target.split(".")
    holder, name = (_inner_mapping(flat, key), inner) if inner else (flat, key)
    if holder is None or value is None:
        return
    if holder.get(name) is None:
        holder[name] = value
        problems.source.where[target] = problems.source.where.get(alias, problems.source.label)
    elif not _same(holder[name], value):
        problems.add(alias, f"{value} disagrees with {target} {holder[name]}; set only {target}")


def _inner_mapping(flat: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = flat.get(key)
    flat[key] = {} if value is None else dict(value) if isinstance(value, Mapping) else value
    return flat[key] if isinstance(flat[key], dict) else None


def _same(one: Any, other: Any) -> bool:
    texts = isinstance(one, str) and isinstance(other, str)
    return one.lower() == other.lower() if texts else one == other


def _translate_fp16(flat: dict[str, Any], problems: Problems) -> None:
    """GPT-NeoX's own names in the fp16 section: `fp16: true` says nothing, `type: bfloat16` means the bf16 section."""
    section = flat.get("fp16")
    if not isinstance(section, dict):
        return
    section.pop("fp16", None)
    kind = section.pop("type", "fp16")
    if kind not in ("fp16", "bfloat16"):
        problems.add("fp16.type", f"`{kind}` is not one of fp16 | bfloat16")
    if kind == "bfloat16":
        enabled = {"enabled": True} if section.get("enabled") is True else {}
        flat["fp16"] = None
        flat["bf16"] = enabled | (flat.get("bf16") or {})


def _known_values(flat: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """The values that belong to the schema and are set; every other key is accounted for."""
    known: dict[str, Any] = {}
    for key, value in flat.items():
        choice = value.lower() if isinstance(value, str) else value
        absent = UNSUPPORTED_CHOICES.get(key, {})
        if key in MISPLACED:
            problems.add(key, MISPLACED[key])
        elif key in UNSUPPORTED:
            _check_unsupported(key, value, problems)
        elif key not in KEYS and key not in INERT:
            problems.add(key, f"unknown key{nearest(key, KNOWN)}")
        elif isinstance(choice, str | bool) and choice in absent:
            problems.add(key, f"`{value}`: {absent[choice]} is not supported yet{_choices(key)}")
        elif key in KEYS and value is not None:
            known[key] = value
    return known


def _check_unsupported(key: str, value: Any, problems: Problems) -> None:
    default, feature = UNSUPPORTED[key]
    if not is_inert(value, default):
        problems.add(key, f"{feature} is not supported yet; leave the key out")


def _group(name: str, kind: type[ConfigGroup], known: dict[str, Any], problems: Problems) -> ConfigGroup:
    """The group `name`; keys at fault are reported and replaced by their defaults."""
    values = {key: value for key, value in known.items() if KEYS[key].group == name}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
    for fault in faults:
        report(fault, problems)
    at_fault = {owner_of(path_of(fault)) for fault in faults}
    kept = {key: value for key, value in values.items() if key not in at_fault}
    stand_ins = {key: value for key, value in _PLACEHOLDERS.items() if KEYS[key].group == name}
    return kind.model_validate(stand_ins | kept)


def _choices(key: str) -> str:
    names = [str(choice) for choice in choices_of(key)]
    return f" ({' | '.join(names)})" if names else ""


def raise_if(problems: list[str]) -> None:
    """Raise all problems as one error, if there are any.

    Raises:
        ConfigError: there is at least one.
    """
    if problems:
        raise ConfigError(problems)


Overrides = Mapping[str, Any] | Sequence[str]


class Config(Settings):
    """A resolved configuration: frozen groups of typed values."""

    def override(self, overrides: Overrides, files: Sequence[str | Path] = ()) -> Self:
        """A copy with some keys changed, validated anew.

        Args:
            overrides: a mapping of dotted keys to values, or texts `key=value`.
            files: YAML files that are merged before the overrides.

        Raises:
            ConfigError: the result is not valid.

        Keys that follow another by default (num_kv_heads, max_position_embeddings) still follow it, unless they
        were set.
        """
        problems: list[str] = []
        given = Layer("configuration", self._nested(only_set=True), {})
        read = [layer for file in files if (layer := read_file(file, problems)) is not None]
        return self._from_layers([given, *read, *_override_layers(overrides, problems)], problems)

    def to_yaml(self) -> str:
        """Every key with its resolved value, as flat YAML from which load_config makes an equal Config."""
        return dump(self._nested(only_set=False))

    def flat(self) -> dict[str, Any]:
        """Every resolved value by the dotted path of its key, for example `num_layers` or `optimizer.params.lr`."""
        return {
            path: value
            for name in type(self).model_fields
            for path, value in getattr(self, name).model_dump(by_alias=True).items()
        }

    def _nested(self, only_set: bool) -> dict[str, Any]:
        """Values as they stand in YAML, without group names."""
        flat: dict[str, Any] = {}
        for name in type(self).model_fields:
            group: ConfigGroup = getattr(self, name)
            for path, value in group.model_dump(by_alias=True, exclude_unset=only_set).items():
                *parents, last = path.split(".")
                inner = flat
                for parent in parents:
                    inner = inner.setdefault(parent, {})
                inner[last] = list(value) if isinstance(value, tuple) else value
        return flat

    @classmethod
    def _from_layers(cls, layers: Sequence[Layer], problems: list[str]) -> Self:
        groups, found = validate(merge(layers))
        raise_if(problems + found)
        return cls.model_validate(groups)


def load_config(paths: str | Path | Sequence[str | Path], overrides: Overrides = ()) -> Config:
    """Merge YAML or JSON files left to right, then overrides, and validate the result.

    Args:
        paths: one file or several; later files win, mappings are merged key by key, null means `not set`.
        overrides: a mapping of dotted keys to values, or texts `key=value` whose values are read as YAML.

    Returns:
        The configuration. Hyphens and underscores in keys are alike.

    Raises:
        ConfigError: with every problem of all files and overrides at once.
    """
    problems: list[str] = []
    files = [read_file(path, problems) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    layers = [layer for layer in files if layer is not None] + _override_layers(overrides, problems)
    if None in files:
        raise ConfigError(problems + _certain_problems(layers))
    return Config._from_layers(layers, problems)


def _override_layers(overrides: Overrides, problems: list[str]) -> list[Layer]:
    layers: list[Layer] = []
    for item in read_overrides(overrides):
        if isinstance(item, ConfigError):
            problems += item.problems
        else:
            layers.append(item)
    return layers


def _certain_problems(layers: Sequence[Layer]) -> list[str]:
    """Problems of the readable files while another cannot be read, which may hold what seems to be missing."""
    _, found = validate(merge(layers))
    return [line for line in found if not line.endswith("required, but missing")]
