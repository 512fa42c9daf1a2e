"""Importing this activates the plugin."""

from megatron_coca.neox_plugin.activation import activate

activate()
