"""Configuration: GPT-NeoX's YAML keys, typed, validated and frozen. Does not import PyTorch."""

from megatron_coca.config.base import ConfigError
from megatron_coca.config.checks.optimization import parts_with_weights
from megatron_coca.config.data import split_shares
from megatron_coca.config.load import Config, keys_without_effect, load_config, split_inputs
from megatron_coca.config.model import ModelConfig
from megatron_coca.config.optimization import BatchSizes, OptimizerConfig
from megatron_coca.config.parallelism import LaunchConfig, ParallelConfig
from megatron_coca.config.position import PositionConfig
from megatron_coca.config.run_stages import RunStage, stage_at
from megatron_coca.config.running import CheckpointConfig, FaultConfig
from megatron_coca.config.saved import SavedConfig, load_saved_config, named_imports
from megatron_coca.config.schedule import ScheduleConfig
from megatron_coca.config.schema import COMPUTE_KEYS, KEYS
from megatron_coca.config.weight_changes import FORM_KEYS, adds_norms, form_keys, norm_changes, weight_changes

__all__ = [
    "COMPUTE_KEYS",
    "FORM_KEYS",
    "KEYS",
    "BatchSizes",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "FaultConfig",
    "LaunchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PositionConfig",
    "RunStage",
    "SavedConfig",
    "ScheduleConfig",
    "adds_norms",
    "form_keys",
    "keys_without_effect",
    "load_config",
    "load_saved_config",
    "named_imports",
    "norm_changes",
    "parts_with_weights",
    "split_inputs",
    "split_shares",
    "stage_at",
    "weight_changes",
]
