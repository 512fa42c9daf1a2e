"""Activate the plugin on import."""

from megatron_coca.neox_plugin.activation import activate

activate()
