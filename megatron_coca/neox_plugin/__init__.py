"""CoCA and the extensions of rotary positions inside an unmodified GPT-NeoX checkout; see docs/neox.md.

Activated by `python -m megatron_coca.neox_plugin deepy.py train.py ...`, by `import megatron_coca.neox_plugin.active`
at the top of a script, or by a call of `activate`. Upstream's modules are imported then, and not before.
"""

from megatron_coca.neox_plugin.activation import activate
from megatron_coca.neox_plugin.wrapping import IncompatibleError

__all__ = ["IncompatibleError", "activate"]
