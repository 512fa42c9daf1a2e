"""Models that no stock architecture of transformers computes: their folders carry a modelling file of ours.

Such a folder is that of a stock architecture in all but three things. Its `model_type` is a name of its own, so that
nobody loads it as the stock model and gets wrong numbers without a word. Its config.json has the mapping `position`,
which says everything about positions in our own keys. And parts that learn about positions add weights
(`weight_map.learned_positions`). `max_position_embeddings` is the training length, as everywhere in transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_coca.checkpoints import weight_map

REMOTE_TYPES: dict[str, str] = {"coca_llama": "llama", "coca_gpt_neox": "gpt_neox"}
"""`model_type` of a folder with our modelling file -> that of the stock architecture whose shape it has."""

POSITION = "position"
"""The key of config.json under which the position method stands."""

POSITION_KEYS = (
    "pos_emb",
    "rotary_pct",
    "rotary_emb_base",
    "rope_scaling",
    "relative_positions",
    "logit_scaling",
    "rpe_num_buckets",
    "rpe_max_distance",
)
LEARNED_ROWS = "max_position_embeddings"
"""Ours of that name: the rows of the table of learned positions. Theirs is the training length."""


def position_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Our keys of the position method out of the config.json of a folder with our modelling file.

    Raises:
        KeyError: it has no mapping `position`.
    """
    position = config[POSITION]
    if not isinstance(position, Mapping):
        raise KeyError(POSITION)
    return {name: position[name] for name in (*POSITION_KEYS, LEARNED_ROWS) if name in position}


def rows(kind: str) -> tuple[weight_map.Row, ...]:
    """Names of the weights in a folder of `model_type` `kind`, a key of `REMOTE_TYPES`.

    They are those of the stock architecture, but for the head of GPT-NeoX: transformers 5 calls it `lm_head` and maps
    the older name of stock folders alone.
    """
    stock = {"gpt_neox": weight_map.GPT_NEOX, "llama": weight_map.llama("k_proj")}[REMOTE_TYPES[kind]]
    named = (replace(row, theirs=("lm_head.weight",)) if row.theirs == ("embed_out.weight",) else row for row in stock)
    return (*named, *weight_map.learned_positions(REMOTE_TYPES[kind]))
