"""Families of GLM. Each is a row (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.defaults import MODERN, rows_of
from megatron_coca.checkpoints.huggingface.families.keys import Family
from megatron_coca.checkpoints.huggingface.families.tables import Rows
from megatron_coca.checkpoints.huggingface.weight_map import GATE_FIRST, NEIGHBOURS, PRE, layer_rows, like_llama


def packed_gate(rows: Rows) -> Rows:
    """Return LLaMA's table for an MLP with gate and up projection in one matrix, the gate first."""
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
}
"""`model_type` -> family."""
