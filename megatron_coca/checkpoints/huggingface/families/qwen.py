"""Families of Qwen. Each is a row (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.defaults import BIASES, MODERN, RMS, rows_of
from megatron_coca.checkpoints.huggingface.families.keys import FROM_LAYER, Family
from megatron_coca.checkpoints.huggingface.weight_map import PRE, QK_HEAD, like_llama

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
}
"""`model_type` -> family."""
