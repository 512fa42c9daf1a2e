"""Families of OLMo. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.parts.defaults import BIASES, MODERN, RMS, RMS_5, Json, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    ROUTER_LOSS,
    TOP_K,
    counted_experts,
    experts_only,
    with_experts,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family, every
from megatron_coca.checkpoints.huggingface.weight_map import POST, PRE, QK_PROJECTION, like_llama

OLMO = RMS_5 | BIASES


def _two_keys(scaling: Json) -> Json:
    """Return only the two keys that OLMo's class in transformers 4 accepts.

    The class stops with an error on other extensions, so these are returned unchanged.
    """
    if scaling["rope_type"] not in ("linear", "dynamic"):
        return scaling
    return {"type": scaling["rope_type"], "factor": scaling["factor"]}


FAMILIES: dict[str, Family] = {
    "olmo2": Family(
        "Olmo2ForCausalLM",
        rows_of(like_llama(POST | QK_PROJECTION)),
        MODERN | {"norm_position": "post", "qk_norm": "projection"},
        OLMO,
        older=_two_keys,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        rows_of(like_llama(POST | QK_PROJECTION)),
        MODERN | {"norm_position": "post", "qk_norm": "projection"},
        OLMO,
        rope=500000.0,
        windows=every(4),
        window=4096,
        by_type=(None, 500000.0),
        older=_two_keys,
    ),
    "olmo": Family(
        "OlmoForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN | {"norm": "non_parametric_layernorm", "layernorm_epsilon": 1e-5},
        BIASES | {"clip_qkv": ("clip_qkv", None)},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        with_experts(like_llama(PRE | QK_PROJECTION)),
        MODERN | {"qk_norm": "projection"},
        OLMO | dict(TOP_K) | {"num_experts": ("moe_num_experts", 64), "num_experts_per_tok": ("moe_top_k", 8)},
        {"clip_qkv": None},  # the class limits queries and keys after their norms, but our layers before
        {"head_dim": None},
        read=counted_experts("num_experts", 64),
        write=experts_only,
        harmless=ROUTER_LOSS,
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        with_experts(like_llama(POST | QK_PROJECTION)),
        MODERN | {"norm_position": "post", "qk_norm": "projection"},
        RMS | BIASES | dict(TOP_K) | {"num_experts": ("moe_num_experts", 7), "num_experts_per_tok": ("moe_top_k", 5)},
        rope=500000.0,
        read=counted_experts("num_experts", 7),
        write=experts_only,
        harmless=ROUTER_LOSS,
    ),
}
"""`model_type` -> family."""
