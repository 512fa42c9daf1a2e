"""Names in GPT-NeoX checkpoints that record the position method. The GPT-NeoX plugin writes and reads them too.

GPT-NeoX's names of weights do not depend on the position method, and neither its load nor its converter to Hugging Face
reads `pos_emb`: both would read a CoCA model as a rotary one without an error. The query-key-value projection of the
plugin's attention therefore has its own name, PROJECTION, so that GPT-NeoX's strict load and its converter stop with an
error if the plugin is not active.

This module runs in GPT-NeoX's environment: it needs Python 3.10 and imports nothing but the configuration.
"""

from typing import Any

from megatron_coca.config import Config
from megatron_coca.config.schema import SELECTORS

EXTENDING = tuple(SELECTORS)
"""Position keys that GPT-NeoX does not have."""

PLAIN, PROJECTION = "query_key_value.", "megatron_coca_query_key_value."
"""Prefix of the projection within attention: GPT-NeoX's own, and the one in checkpoints of the plugin's attention."""

RECORD = "megatron_coca"
"""Key in a checkpoint's `args` that has the values of POSITIONS."""

FIXED = ("pos_emb", "rotary_pct")
POSITIONS = (*FIXED, "rotary_emb_base", *EXTENDING)
"""Recorded keys. The weights depend on those in FIXED; the others may be changed for longer inputs."""


def saved_name(name: str) -> str:
    """Return the name of a weight in checkpoints of the plugin's attention."""
    return name.replace(f"attention.{PLAIN}", f"attention.{PROJECTION}")


def plain_name(name: str) -> str:
    """Return GPT-NeoX's name of a weight in a checkpoint."""
    return name.replace(f"attention.{PROJECTION}", f"attention.{PLAIN}")


def record_of(config: Config) -> dict[str, Any]:
    """Return the recorded values by key; mappings contain only values that differ from the defaults."""
    values = config.position.model_dump(by_alias=True)
    short = config.position.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    return {name: short.get(name, values[name]) for name in POSITIONS}
