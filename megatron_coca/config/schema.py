"""The groups of keys put together, and every key's place in them."""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from megatron_coca.config.base import ConfigGroup
from megatron_coca.config.model import ModelConfig
from megatron_coca.config.position import PositionConfig, RelativePositions, RopeScaling
from megatron_coca.config.run import (
    CheckpointConfig,
    DataConfig,
    FaultConfig,
    GeneralConfig,
    LaunchConfig,
    LoggingConfig,
)
from megatron_coca.config.training import (
    BatchConfig,
    Bf16,
    Fp16,
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
        """Seed of initialisation, dropout and data order."""
        return self.general.seed


GROUPS: dict[str, type[ConfigGroup]] = {
    "model": ModelConfig,
    "position": PositionConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "batch": BatchConfig,
    "precision": PrecisionConfig,
    "parallel": ParallelConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "faults": FaultConfig,
    "logging": LoggingConfig,
    "launch": LaunchConfig,
    "general": GeneralConfig,
}


class KeyLocation(NamedTuple):
    """Where the value of a key is kept."""

    group: str
    field: str


def _places() -> Iterator[tuple[str, KeyLocation]]:
    for group, kind in GROUPS.items():
        for name, field in kind.model_fields.items():
            yield field.alias or name, KeyLocation(group, name)


KEYS: dict[str, KeyLocation] = dict(_places())
"""Every key by its dotted path in YAML, for example `num_layers` and `optimizer.params.lr`."""

SECTIONS = frozenset(key[:end] for key in KEYS for end, letter in enumerate(key) if letter == ".")
"""Mappings that only hold keys of their own: `optimizer` and `optimizer.params`."""

NESTED: dict[str, tuple[str, ...]] = {
    "rope_scaling": tuple(RopeScaling.model_fields),
    "relative_positions": tuple(RelativePositions.model_fields),
    "fp16": tuple(Fp16.__annotations__),
    "bf16": tuple(Bf16.__annotations__),
}
"""Keys whose value is a mapping with names of its own."""

CLOSED = SECTIONS | frozenset(NESTED)
"""Mappings in which every name is known; in all others names and nulls are passed through as written."""
