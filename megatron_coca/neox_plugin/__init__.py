"""Add CoCA and RoPE extensions to an unmodified GPT-NeoX checkout; see docs/neox.md.

Activate with `python -m megatron_coca.neox_plugin deepy.py train.py ...`, with
`import megatron_coca.neox_plugin.active` at the top of a script, or with `activate()`. Activation imports GPT-NeoX's
modules.
"""

from megatron_coca.neox_plugin.activation import activate
from megatron_coca.neox_plugin.upstream import IncompatibleError
