"""Families of Gemma, except Gemma 4. Each is a row (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.defaults import (
    BIASES,
    MODERN,
    RMS,
    Json,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.keys import Family, every
from megatron_coca.checkpoints.huggingface.weight_map import PRE, QK_HEAD, SANDWICH, like_llama
from megatron_coca.config import Config

GEMMA = MODERN | {"norm_position": "sandwich", "zero_centered_norms": True}

CAPPED = (
    RMS
    | BIASES
    | {
        "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    }
)


def _gemma(config: Json, keys: Json) -> dict[str, Any]:
    # As in the class, the name gelu means the tanh approximation.
    named = {"activation": "geglu_tanh"} if config.get("hidden_act") == "gelu" else {}
    return named | {"embedding_scale": float(config["hidden_size"]) ** 0.5}


def _scales(config: Json, keys: Json) -> dict[str, Any]:
    """Return the scales of Gemma's attention and embedding."""
    return {
        "softmax_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
    }


def _to_scale(config: Config) -> dict[str, Any]:
    """Return Gemma's key for the scale of attention."""
    scale = config.model.softmax_scale or config.model.head_dim**-0.5
    return {"query_pre_attn_scalar": round(scale**-2)}


FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        "Gemma2ForCausalLM",
        rows_of(like_llama(SANDWICH)),
        GEMMA,
        CAPPED,
        {"use_bidirectional_attention": False},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        windows=every(2),
        window=4096,
        read=_scales,
        write=_to_scale,
        harmless=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        rows_of(like_llama(SANDWICH | QK_HEAD)),
        GEMMA | {"qk_norm": "head"},
        RMS | BIASES | {"final_logit_softcapping": ("final_logit_softcapping", None)},
        {"use_bidirectional_attention": False},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        rope=1000000.0,
        windows=every(6, "sliding_window_pattern"),
        window=4096,
        by_type=("rope_local_base_freq", 10000.0),
        read=_scales,
        write=_to_scale,
        harmless=frozenset(
            {
                *("cache_implementation", "hidden_act", "_sliding_window_pattern", "sliding_window_pattern"),
                "attn_logit_softcapping",  # Gemma 3's class ignores this key
            }
        ),
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN | {"zero_centered_norms": True},
        RMS | BIASES,
        {"use_bidirectional_attention": False},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        read=_gemma,
        harmless=frozenset({"hidden_activation"}),
    ),
    "vaultgemma": Family(
        "VaultGemmaForCausalLM",
        rows_of(
            like_llama({"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_feedforward_layernorm"})
        ),
        MODERN | {"zero_centered_norms": True},
        CAPPED,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        windows=every(2),
        window=4096,
        read=_scales,
        write=_to_scale,
        harmless=frozenset({"cache_implementation", "use_bidirectional_attention"}),
    ),
}
"""`model_type` -> family."""
