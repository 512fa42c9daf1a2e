"""All groups of keys in one model, and the location of every key in them."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.model import ModelConfig, PositionConfig, RelativePositions, RopeScaling
from megatron_coca.config.training import (
    BatchConfig,
    Bf16,
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    Fp16,
    GeneralConfig,
    LaunchConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ScheduleConfig,
)


class Settings(BaseModel):
    """All groups of a resolved configuration. YAML is flat: group names never appear in it."""

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

    @property
    def seed(self) -> int:
        """Seed of initialization, dropout and data order."""
        return self.general.seed


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
        "cuda_graphs",
    }
)
"""Keys that say how a model is computed, not which model it is or what it is trained with."""
SECTIONS = frozenset(key[:end] for key in KEYS for end, letter in enumerate(key) if letter == ".")
"""Mappings of keys that are themselves keys of the schema: `optimizer` and `optimizer.params`."""

NESTED: dict[str, tuple[str, ...]] = {
    "rope_scaling": tuple(RopeScaling.model_fields),
    "relative_positions": tuple(RelativePositions.model_fields),
    "fp16": tuple(Fp16.__annotations__),
    "bf16": tuple(Bf16.__annotations__),
}
"""Keys whose value is a mapping with a fixed set of names."""

CLOSED = SECTIONS | frozenset(NESTED)
"""Mappings in which every name is known; all others are passed through unchanged."""
