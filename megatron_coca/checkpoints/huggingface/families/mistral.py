"""Families of Mistral AI. Each is a row (see `keys.Family`)."""

from megatron_coca.checkpoints.huggingface.families.defaults import MODERN, RMS, rows_of
from megatron_coca.checkpoints.huggingface.families.keys import ALL_LAYERS, LISTED, Family
from megatron_coca.checkpoints.huggingface.weight_map import PRE, like_llama

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
}
"""`model_type` -> family."""
