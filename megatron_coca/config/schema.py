"""One model with all key groups, and the location of every key in it."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from megatron_coca import methods
from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.data import DataConfig, SyntheticConfig, TrainingPositions
from megatron_coca.config.metric_sinks import METRIC_SINKS, names_within
from megatron_coca.config.model import ModelConfig
from megatron_coca.config.optimization import BatchConfig, Bf16, Fp16, LoraConfig, OptimizerConfig, PrecisionConfig
from megatron_coca.config.parallelism import LaunchConfig, ParallelConfig
from megatron_coca.config.position import ORIGINAL, PositionConfig
from megatron_coca.config.running import CheckpointConfig, FaultConfig, GeneralConfig, LoggingConfig
from megatron_coca.config.schedule import ScheduleConfig


class Settings(BaseModel):
    """All key groups of a resolved configuration. YAML is flat: it does not contain group names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    position: PositionConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    batch: BatchConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    faults: FaultConfig
    logging: LoggingConfig
    launch: LaunchConfig
    general: GeneralConfig


class KeyLocation(NamedTuple):
    """Group and field of a key."""

    group: str
    field: str


GROUPS: dict[str, type[ConfigGroup]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in Settings.model_fields.items()
}

KEYS: dict[str, KeyLocation] = {
    field.alias or name: KeyLocation(group, name)
    for group, kind in GROUPS.items()
    for name, field in kind.model_fields.items()
}
"""Every key by its dotted path in YAML, for example `num_layers` and `optimizer.params.lr`."""


def default_of(key: str, flat: Mapping[str, Any]) -> Any:
    """Return the default of a key. If the key follows another key, the default is that key's value in `flat`. A value
    that is computed from other keys does not count as the default.
    """
    declared = GROUPS[KEYS[key].group].model_fields[KEYS[key].field]
    extra = declared.json_schema_extra
    if not isinstance(extra, dict):
        return declared.default
    return flat[str(extra["follows"])] if "follows" in extra else extra["default"]


def not_at_default(keys: Iterable[str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in `flat` of those `keys` that are not at their defaults, by key."""
    return {key: flat[key] for key in keys if flat[key] != default_of(key, flat)}


MODEL_KEYS = tuple(key for key, place in KEYS.items() if place.group in ("model", "position"))
"""Every key of the network and of its positions."""


COMPUTE_KEYS = frozenset(
    {
        "attention_backend",
        "operand_kernel",
        "checkpoint_activations",
        "checkpoint_num_layers",
        "checkpoint_policy",
        "loss_chunk_size",
        "loss_kernel",
        "torch_compile",
    }
)
"""Keys that change how a model is computed, but neither the model nor its training data."""
SECTIONS = frozenset(key[:end] for key in KEYS for end, letter in enumerate(key) if letter == ".")
"""Mappings that contain keys of the schema: `optimizer` and `optimizer.params`."""

SELECTORS: dict[str, str] = {
    "rotary_frequencies": "type",
    "rope_scaling": "rope_type",
    "relative_positions": "type",
    "logit_scaling": "type",
}
"""Keys that select a declared choice, each with the field of its mapping that names the choice."""
MAPPINGS: dict[str, type[ConfigGroup]] = {
    "synthetic": SyntheticConfig,
    "training_positions": TrainingPositions,
    "lora": LoraConfig,
}
"""Keys with a mapping of fixed names, each with the model of the mapping."""

CLOSED = SECTIONS | SELECTORS.keys() | MAPPINGS.keys() | {"pos_emb_options", METRIC_SINKS, "fp16", "bf16"}
"""Mappings in which only known names are valid. All other mappings are passed through unchanged."""


def nested_names(key: str) -> tuple[str, ...]:
    """Return every valid name in the mapping of a key; empty if the key has no mapping with known names."""
    if key in SELECTORS:
        return (SELECTORS[key], *[ORIGINAL] * (key == "rope_scaling"), *_option_names(key))
    if key == "pos_emb_options":
        return _option_names("pos_emb")
    if key in MAPPINGS:
        return tuple(MAPPINGS[key].model_fields)
    if key.partition(".")[0] == METRIC_SINKS:
        return names_within(key)
    return tuple({"fp16": Fp16, "bf16": Bf16}[key].__annotations__) if key in ("fp16", "bf16") else ()


def _option_names(key: str) -> tuple[str, ...]:
    """Return the name of every option of a key's choices."""
    return tuple(dict.fromkeys(option.name for choice in methods.TABLES[key].values() for option in choice.options))
