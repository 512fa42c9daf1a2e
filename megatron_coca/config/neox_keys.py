"""GPT-NeoX's keys that are not in the schema, from neox_keys.yaml: aliases, keys without effect, unsupported keys."""

from pathlib import Path
from typing import Any

from megatron_coca.support.safe_yaml import read_yaml

_TABLES = read_yaml(Path(__file__).with_suffix(".yaml"))

INERT: dict[str, str] = {key: row["reason"] for row in _TABLES["inert"] for key in row["keys"].split()}
"""Keys that are accepted and have no effect, each with the reason."""

SAME: frozenset[str] = frozenset(_TABLES["meanings"]["same"].split())
"""Schema keys and aliases with the same meaning as in GPT-NeoX."""

DIFFERENT: dict[str, str] = _TABLES["meanings"]["different"]
"""Schema keys and aliases with a different meaning in GPT-NeoX, each with the difference."""

ALIASES: dict[str, str] = _TABLES["aliases"]
"""Aliases and their keys. An alias and its key may both be set to the same value."""

ALIAS_VALUES: dict[str, dict[Any, Any]] = {"fp32_allreduce": {True: "fp32", False: None}}
"""Aliases whose values differ from those of their keys: the key's value for each value of the alias."""

HUGGING_FACE: dict[str, str] = _TABLES["hugging_face"]
"""Hugging Face names of keys (TrainingArguments and model configurations), for messages about unknown keys."""

MISPLACED: dict[str, str] = _TABLES["misplaced"]
"""Keys at the wrong level of the file, in another unit, or without a counterpart, each with the remedy."""

UNSUPPORTED: dict[str, tuple[Any, str]] = {
    key: (row["default"], row["feature"]) for row in _TABLES["unsupported"] for key in row["keys"].split()
}
"""Keys of unsupported features, each with GPT-NeoX's default, which is accepted, and the name of the feature."""

UNSUPPORTED_CHOICES: dict[str, dict[Any, str]] = _TABLES["unsupported_choices"]
"""For each supported key, its unsupported values in lower case, each with the name of the unsupported feature."""


def is_inert(value: Any, default: Any) -> bool:
    """Return True if the value of an unsupported key leaves its feature disabled."""
    off = value is None or value == {} or value == [] or (value is False and default is not True)
    return off or (value == default and isinstance(value, bool) == isinstance(default, bool))
