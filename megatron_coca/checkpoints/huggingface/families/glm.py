"""Families of GLM. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.parts.defaults import MODERN, QKV_BIAS, RMS_5, Json, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    ExpertNames,
    deepseek_experts,
    deepseek_keys,
    with_experts,
    written_deepseek_experts,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import Rows
from megatron_coca.checkpoints.huggingface.weight_map import (
    GATE_FIRST,
    NEIGHBOURS,
    PRE,
    QK_HEAD,
    layer_rows,
    like_llama,
)
from megatron_coca.config import Config


def packed_gate(rows: Rows) -> Rows:
    """Return LLaMA's table for an MLP with one matrix for the gate and, after it, the up projection."""
    others = tuple(row for row in rows if ".linear1." not in row.ours)
    return (*others, *layer_rows("model.layers.{i}", {"mlp.linear1": ("mlp.gate_up_proj", GATE_FIRST)}))


GLM = MODERN | {"use_bias_in_attn_linear": False}

GLM_KEYS = {
    "rms_norm_eps": ("rms_norm_epsilon", 1.5625e-07),
    "attention_bias": ("use_bias_in_qkv", True),
}

GLM4_NORMS = {
    "input_layernorm": "input_layernorm",
    "attention_output_layernorm": "post_self_attn_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp_output_layernorm": "post_mlp_layernorm",
}


def _glm4_moe(config: Json, keys: Json) -> dict[str, Any]:
    norms = {"qk_norm": "head" if config.get("use_qk_norm") else None}
    return norms | deepseek_experts(config, 128, 1, 1)


def _written_glm4_moe(config: Config) -> dict[str, Any]:
    return {"use_qk_norm": config.model.qk_norm is not None} | written_deepseek_experts(config)


FAMILIES: dict[str, Family] = {
    "glm": Family(
        "GlmForCausalLM",
        rows_of(packed_gate(like_llama(PRE, NEIGHBOURS))),
        GLM,
        GLM_KEYS,
        head_dim=128,
        share=0.5,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        rows_of(packed_gate(like_llama(GLM4_NORMS, NEIGHBOURS))),
        GLM | {"norm_position": "sandwich"},
        GLM_KEYS,
        head_dim=128,
        share=0.5,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        with_experts(like_llama(PRE | QK_HEAD), ExpertNames(shared="shared_experts")),
        MODERN,
        RMS_5 | QKV_BIAS | deepseek_keys(128, 8, True),
        share=0.5,
        read=_glm4_moe,
        write=_written_glm4_moe,
        harmless=frozenset({"output_router_logits", "num_nextn_predict_layers", "num_mtp_layers"}),
        later_layers=True,
    ),
}
"""`model_type` -> family."""
