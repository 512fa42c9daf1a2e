"""Turns merged values into typed groups, gathering every problem on the way."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megatron_coca.config.checks import find_faults
from megatron_coca.config.errors import ConfigError, nearest
from megatron_coca.config.fields import Group
from megatron_coca.config.neox_keys import (
    ALIAS_VALUES,
    ALIASES,
    INERT,
    MISPLACED,
    UNSUPPORTED,
    UNSUPPORTED_CHOICES,
    is_inert,
)
from megatron_coca.config.problems import KNOWN, Problems, choices_of, owner_of, path_of, report
from megatron_coca.config.schema import CLOSED, GROUPS, KEYS, SECTIONS, Settings
from megatron_coca.config.source import Layer

_PLACEHOLDERS = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1}


def validate(source: Layer) -> tuple[dict[str, Group], list[str]]:
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


def _group(name: str, kind: type[Group], known: dict[str, Any], problems: Problems) -> Group:
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
