"""Families of Qwen. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.parts.defaults import BIASES, MODERN, RMS, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    ROUTER_LOSS,
    TOP_K,
    ExpertNames,
    counted_experts,
    sparse_steps,
    with_experts,
    written_steps,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import FROM_LAYER, SWITCHED, Family
from megatron_coca.checkpoints.huggingface.weight_map import PRE, QK_HEAD, like_llama

EXPERTS_2 = {
    "num_experts": ("moe_num_experts", 60),
    "num_experts_per_tok": ("moe_top_k", 4),
    "moe_intermediate_size": ("moe_intermediate_size", 1408),
    "shared_expert_intermediate_size": ("moe_shared_intermediate_size", 5632),
    "qkv_bias": ("use_bias_in_qkv", True),
}
EXPERTS_3 = {
    "num_experts": ("moe_num_experts", 128),
    "num_experts_per_tok": ("moe_top_k", 8),
    "moe_intermediate_size": ("moe_intermediate_size", 768),
}


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN | {"use_bias_in_qkv": True},
        RMS,
        {"use_mrope": False},
        windows=FROM_LAYER,
        window=4096,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        rows_of(like_llama(PRE | QK_HEAD)),
        MODERN | {"qk_norm": "head"},
        RMS | BIASES,
        head_dim=128,
        windows=FROM_LAYER,
        window=4096,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        with_experts(like_llama(PRE), ExpertNames(shared="shared_expert")),
        MODERN,
        RMS | dict(TOP_K) | EXPERTS_2,
        {"use_mrope": False},
        windows=FROM_LAYER,
        window=4096,
        read=counted_experts("num_experts", 60, {"moe_shared_gate": True}, sparse_steps),
        write=written_steps,
        harmless=ROUTER_LOSS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        with_experts(like_llama(PRE | QK_HEAD)),
        MODERN | {"qk_norm": "head"},
        RMS | BIASES | dict(TOP_K) | EXPERTS_3,
        first={"num_local_experts": "num_experts"},
        windows=SWITCHED,
        window=4096,
        read=counted_experts("num_experts", 128, layers=sparse_steps),
        write=written_steps,
        harmless=ROUTER_LOSS | {"max_window_layers"},
    ),
}
"""`model_type` -> family."""
