"""Transformers architectures other than GPT-NeoX and LLaMA. Each is a row of FAMILIES (see `family_keys.Family`)."""

from collections.abc import Mapping
from typing import Any

from megatron_coca.checkpoints.huggingface import weight_map
from megatron_coca.checkpoints.huggingface.families_gemma4 import LIKE_GEMMA4
from megatron_coca.checkpoints.huggingface.families_gpt import LIKE_GPT
from megatron_coca.checkpoints.huggingface.families_granite import LIKE_GRANITE
from megatron_coca.checkpoints.huggingface.families_llama import LIKE_LLAMA
from megatron_coca.checkpoints.huggingface.family_defaults import (
    BIASES,
    EPSILON,
    LAYERNORM,
    MODERN,
    RMS,
    RMS_5,
    NotSupported,
    gemma_scales,
    rows_of,
    to_gemma_scale,
)
from megatron_coca.checkpoints.huggingface.family_keys import (
    ALL_LAYERS,
    FROM_LAYER,
    ROPE_INTERVAL,
    WITH_WINDOW,
    WITHOUT_ROTATION,
    Family,
    every,
)
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM
from megatron_coca.config import Config
from megatron_coca.config.position import ORIGINAL

Json = Mapping[str, Any]
OLMO = RMS_5 | BIASES


GEMMA = MODERN | {"norm_position": "sandwich", "zero_centered_norms": True}
CAPPING = RMS | BIASES


def _gpt2(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


def _to_phi3(config: Config) -> dict[str, Any]:
    # Phi 3's class reads the original length only at the top level of config.json, and has a default for it.
    return {ORIGINAL: config.position.original_length(config.model.seq_length)}


def _two_keys(scaling: Json) -> Json:
    """Return only the two keys that OLMo's class in transformers 4 accepts.

    The class stops with an error on other extensions, so these are returned unchanged.
    """
    if scaling["rope_type"] not in ("linear", "dynamic"):
        return scaling
    return {"type": scaling["rope_type"], "factor": scaling["factor"]}


def _three_keys(scaling: Json) -> Json:
    """Return only the three keys that Phi 3's class in transformers 4 accepts. The class derives the factor itself."""
    if scaling["rope_type"] != "longrope" or "attention_factor" in scaling:
        return scaling
    return {"type": "longrope"} | {name: scaling[name] for name in ("short_factor", "long_factor")}


def _power_of_two(config: Json, keys: Json) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    if heads & (heads - 1):
        raise NotSupported(f"n_heads: {heads} is not a power of two, so MPT's ALiBi slopes are not supported")
    return {"attention_dropout": float(config.get("attn_config.attn_pdrop") or 0)}


def _to_mpt(config: Config) -> dict[str, Any]:
    heads, model = config.model.num_attention_heads, config.model
    chosen = {"alibi": True, "alibi_bias_max": 8, "softmax_scale": model.softmax_scale, "attn_pdrop": 0}
    return {} if heads & (heads - 1) else {"attn_config": chosen}


def _falcon(config: Json, keys: Json) -> dict[str, Any]:
    heads, newer = config["num_attention_heads"], bool(config.get("new_decoder_architecture"))
    norms, parallel = config.get("num_ln_in_parallel_attn") or 1 + newer, config.get("parallel_attn", True)
    if (norms == 2 and not newer) or (newer and not parallel):
        raise NotSupported(
            "new_decoder_architecture: contradicts num_ln_in_parallel_attn or parallel_attn; correct one"
        )
    one_key = config.get("multi_query", True) and not newer
    given = config.get("num_key_value_heads") or heads if newer else heads
    found = {"num_kv_heads": 1 if one_key else given, "gpt_j_residual": parallel, "gpt_j_tied": parallel and norms == 1}
    found |= dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), bool(config.get("bias")))
    width = config["hidden_size"] // heads
    alibi = {"pos_emb": "alibi", "alibi_slope_scale": width**-0.5, "rope_scaling": None}
    return found | (alibi if config.get("alibi") else {})


def _to_falcon(config: Config) -> dict[str, Any]:
    model = config.model
    parallel, two = model.gpt_j_residual, model.gpt_j_residual and not model.gpt_j_tied
    return {
        "new_decoder_architecture": two or 1 < model.num_kv_heads < model.num_attention_heads,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "parallel_attn": parallel,
        "multi_query": model.num_kv_heads == 1,
        "bias": model.use_bias_in_mlp,
        "alibi": config.position.pos_emb == "alibi",
    }


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        "Qwen2ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.PRE)),
        MODERN | {"use_bias_in_qkv": True},
        RMS,
        {"use_mrope": False},
        windows=FROM_LAYER,
        window=4096,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        rows_of(weight_map.like_llama(weight_map.PRE)),
        MODERN,
        RMS,
        windows=ALL_LAYERS,
        window=4096,
    ),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.PRE)),
        MODERN,
        {"rms_norm_eps": ("rms_norm_epsilon", 1e-5)},
        head_dim=128,
        windows=ALL_LAYERS,
        temperature=True,
        in_older=False,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.PRE | weight_map.QK_HEAD)),
        MODERN | {"qk_norm": "head"},
        RMS | BIASES,
        head_dim=128,
        windows=FROM_LAYER,
        window=4096,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.PRE)),
        MODERN,
        RMS | BIASES | {"mlp_bias": ("use_bias_in_mlp", False)},
        tied=True,
        rope=2000000.0,
        windows=WITHOUT_ROTATION,
        rotating=ROPE_INTERVAL,
        harmless=frozenset({"no_rope_layer_interval", "max_window_layers"}),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.POST | weight_map.QK_PROJECTION)),
        MODERN | {"norm_position": "post", "qk_norm": "projection"},
        OLMO,
        older=_two_keys,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.POST | weight_map.QK_PROJECTION)),
        MODERN | {"norm_position": "post", "qk_norm": "projection"},
        OLMO,
        rope=500000.0,
        windows=every(4),
        window=4096,
        by_type=(None, 500000.0),
        older=_two_keys,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        rows_of(weight_map.PHI3),
        MODERN,
        {
            "rms_norm_eps": ("rms_norm_epsilon", 1e-5),
            "resid_pdrop": ("hidden_dropout", 0.0),
            "embd_pdrop": ("embedding_dropout", 0.0),
        },
        {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        windows=ALL_LAYERS,
        share=1.0,
        rope_types={"su": "longrope", "yarn": "longrope"},
        original=4096,
        older=_three_keys,
        write=_to_phi3,
        harmless=frozenset({"full_attn_mod", "interpolate_factor"}),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.SANDWICH)),
        GEMMA,
        CAPPING
        | {
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        {"use_bidirectional_attention": False},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        windows=every(2),
        window=4096,
        read=gemma_scales,
        write=to_gemma_scale,
        harmless=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        rows_of(weight_map.like_llama(weight_map.SANDWICH | weight_map.QK_HEAD)),
        GEMMA | {"qk_norm": "head"},
        CAPPING | {"final_logit_softcapping": ("final_logit_softcapping", None)},
        {"use_bidirectional_attention": False},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        rope=1000000.0,
        windows=every(6, "sliding_window_pattern"),
        window=4096,
        by_type=("rope_local_base_freq", 10000.0),
        read=gemma_scales,
        write=to_gemma_scale,
        harmless=frozenset(
            {
                *("cache_implementation", "hidden_act", "_sliding_window_pattern", "sliding_window_pattern"),
                "attn_logit_softcapping",  # Gemma 3's class ignores this key
            }
        ),
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        rows_of(weight_map.like_llama({"input_layernorm": "input_layernorm"}, weight_map.NEIGHBOURS)),
        MODERN | {"norm": "layernorm", "gpt_j_residual": True, "gpt_j_tied": True},
        {"layer_norm_eps": ("layernorm_epsilon", 1e-5), "logit_scale": ("final_logit_scale", 0.0625)} | BIASES,
        {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False, "rotary_pct": 1.0},
        tied=True,
        windows=every(4, "sliding_window_pattern"),
        window=4096,
        rotating=WITH_WINDOW,
        harmless=frozenset(
            {
                *("cache_implementation", "order_of_interleaved_layers", "position_embedding_type", "layer_switch"),
                *("use_embedding_sharing", "use_parallel_embedding"),
                *("sliding_window_pattern", "_sliding_window_pattern"),
            }
        ),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        rows_of(weight_map.GPT2),
        LAYERNORM | {"pos_emb": "learned"},
        EPSILON | {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "attention_dropout": "attn_pdrop",
            "num_key_value_heads": None,
        },
        activation=("activation_function", "gelu_new"),
        tied=True,
        length=1024,
        rope=None,
        read=_gpt2,
        harmless=frozenset(
            {
                *("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation"),
                *("summary_proj_to_labels", "summary_first_dropout"),
                *("n_special", "predict_special_tokens", "output_past"),
            }
        ),
    ),
    "mpt": Family(
        "MptForCausalLM",
        rows_of(weight_map.MPT),
        LAYERNORM
        | {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "use_bias_in_norms": False, "pos_emb": "alibi"},
        EPSILON | {"attn_config.softmax_scale": ("softmax_scale", None)},
        {
            "no_bias": True,
            "expansion_ratio": 4,
            "logit_scale": None,
            "attn_config.alibi": True,
            "attn_config.alibi_bias_max": 8,
            "attn_config.attn_type": "multihead_attention",
            "attn_config.clip_qkv": None,
            "attn_config.prefix_lm": False,
            "attn_config.qk_ln": False,
            "attn_config.attn_uses_sequence_id": False,
        },
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
            "intermediate_size": None,
            "attention_dropout": None,
            "num_key_value_heads": None,
        },
        activation=(None, "gelu"),
        tied=True,
        length=2048,
        rope=None,
        read=_power_of_two,
        write=_to_mpt,
        harmless=frozenset(
            {
                *("learned_pos_emb", "init_device", "embedding_fraction", "norm_type", "emb_pdrop", "resid_pdrop"),
                *("init_config", "verbose", "tokenizer_name", "attn_config.attn_impl", "name"),
            }
        ),
    ),
    "bloom": Family(
        "BloomForCausalLM",
        rows_of(weight_map.BLOOM),
        LAYERNORM | {"use_embedding_norm": True, "pos_emb": "alibi"},
        EPSILON | {"hidden_dropout": ("hidden_dropout", 0.0)},
        {"apply_residual_connection_post_layernorm": False},
        {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"}
        | {"intermediate_size": None, "num_key_value_heads": None},
        {"n_embed": "hidden_size"},
        activation=(None, "gelu_pytorch_tanh"),
        tied=True,
        length=2048,
        rope=None,
        harmless=frozenset(
            {
                *("slow_but_exact", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32"),
                *("bias_dropout_fusion", "masked_softmax_fusion", "n_inner"),
            }
        ),
    ),
    "falcon": Family(
        "FalconForCausalLM",
        lambda model: weight_map.falcon(model.gpt_j_residual, 1 if model.gpt_j_residual and model.gpt_j_tied else 2),
        LAYERNORM,
        EPSILON | {"hidden_dropout": ("hidden_dropout", 0.0)},
        {"apply_residual_connection_post_layernorm": False},
        {"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads", "head_dim": None},
        first={"n_embed": "hidden_size"},
        activation=("activation", "gelu"),
        tied=True,
        length=2048,
        attention="sdpa",  # with eager, Falcon's class adds the ALiBi bias twice
        read=_falcon,
        write=_to_falcon,
        harmless=frozenset({"ff_factor"}),
    ),
    **LIKE_GEMMA4,
    **LIKE_LLAMA,
    **LIKE_GRANITE,
    **LIKE_GPT,
}
"""`model_type` -> architecture, in the order in which an export tries them."""
FAMILIES["gpt-sw3"] = FAMILIES["gpt2"]  # another model_type of the same class
