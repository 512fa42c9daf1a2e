"""Names that record the position method in GPT-NeoX checkpoints. The GPT-NeoX plugin writes and reads these names too.

GPT-NeoX's weight names do not depend on the position method, and neither its loading code nor its Hugging Face
converter reads `pos_emb`. They would therefore read a CoCA model as a rotary model without an error. So the
query-key-value projection of the plugin's attention has a name of its own, PROJECTION. If the plugin is not active, the
unknown name makes GPT-NeoX's strict loading and its converter stop with an error.

This module runs in GPT-NeoX's environment, so it must support Python 3.10 and imports only the configuration.
"""

from typing import Any

from megatron_coca.config import Config
from megatron_coca.config.schema import SELECTORS

EXTENDING = tuple(SELECTORS)
"""Position keys that select methods which GPT-NeoX lacks."""
FOREIGN = (*EXTENDING, "pos_emb_options")
"""All position keys that GPT-NeoX lacks."""

PLAIN, PROJECTION = "query_key_value.", "megatron_coca_query_key_value."
"""Prefixes of the query-key-value projection's weights: GPT-NeoX's own prefix, and the prefix that the plugin saves."""

RECORD = "megatron_coca"
"""Key in a checkpoint's `args` under which the values of POSITIONS are saved."""

FIXED = ("pos_emb", "pos_emb_options", "rotary_pct", "rotary_frequencies")
POSITIONS = tuple(dict.fromkeys((*FIXED, "rotary_emb_base", *EXTENDING)))
"""Recorded keys. The weights depend on the keys in FIXED; the other keys may be changed for longer inputs."""


def saved_name(name: str) -> str:
    """Return the name under which the plugin saves a weight, given GPT-NeoX's name."""
    return name.replace(f"attention.{PLAIN}", f"attention.{PROJECTION}")


def plain_name(name: str) -> str:
    """Return GPT-NeoX's name of a weight, given its name in any GPT-NeoX checkpoint."""
    return name.replace(f"attention.{PROJECTION}", f"attention.{PLAIN}")


def record_of(config: Config) -> dict[str, Any]:
    """Return the values of POSITIONS to record. Values that are mappings contain only non-default entries."""
    values = config.position.model_dump(by_alias=True)
    short = config.position.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    return {name: short.get(name, values[name]) for name in POSITIONS}
