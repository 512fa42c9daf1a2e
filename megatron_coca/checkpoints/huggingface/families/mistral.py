"""Families of Mistral AI. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.parts.defaults import MODERN, RMS, RMS_5, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    ROUTER_LOSS,
    ExpertNames,
    counted_experts,
    experts_only,
    with_experts,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import ALL_LAYERS, LISTED, Family
from megatron_coca.checkpoints.huggingface.weight_map import PRE, like_llama

MIXTRAL = ExpertNames("model.layers.{i}.block_sparse_moe", parts=("w3", "w1", "w2"))


FAMILIES: dict[str, Family] = {
    "mistral": Family(
        "MistralForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS,
        windows=ALL_LAYERS,
        window=4096,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        {"rms_norm_eps": ("rms_norm_epsilon", 1e-5)},
        head_dim=128,
        windows=ALL_LAYERS,
        temperature=True,
        in_older=False,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS,
        windows=LISTED,
        window=4096,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        with_experts(like_llama(PRE), MIXTRAL),
        MODERN,
        RMS_5 | {"num_local_experts": ("moe_num_experts", 8), "num_experts_per_tok": ("moe_top_k", 2)},
        {"router_jitter_noise": 0.0},
        rope=1000000.0,
        windows=ALL_LAYERS,
        read=counted_experts("num_local_experts", 8, {"moe_norm_topk_prob": True}),
        write=experts_only,
        harmless=ROUTER_LOSS,
    ),
}
"""`model_type` -> family."""
