"""Configuration: GPT-NeoX's YAML keys, typed, validated and frozen. Imports no torch."""

from megatron_coca.config.errors import ConfigError
from megatron_coca.config.load import Config, load_config
from megatron_coca.config.position import RopeScaling
from megatron_coca.config.training import BatchSizes

__all__ = ["BatchSizes", "Config", "ConfigError", "RopeScaling", "load_config"]
