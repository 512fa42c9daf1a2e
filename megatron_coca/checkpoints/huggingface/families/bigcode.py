"""Families of BigCode. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from typing import Any

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    EPSILON,
    GPT_NAMES,
    LAYERNORM,
    SUMMARY,
    Json,
    one_bias,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import ALL_LAYERS, Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import renamed, ungated, with_norm_bias
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM
from megatron_coca.checkpoints.huggingface.weight_map import PRE, like_llama, modules_of, transformer
from megatron_coca.config import Config

GPT_BIGCODE = transformer(
    "h",
    "wte",
    modules_of("ln_1 ln_2 attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    ("embedding.position_embeddings", "wpe"),
    ("norm", "ln_f"),
)


def _gpt_bigcode(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "num_kv_heads": 1 if config.get("multi_query", True) else config["num_attention_heads"],
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


def _to_gpt_bigcode(config: Config) -> dict[str, Any]:
    return {"multi_query": config.model.num_kv_heads == 1}


FAMILIES: dict[str, Family] = {
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        rows_of(with_norm_bias(renamed(ungated(like_llama(PRE)), {"up_proj": "c_fc", "down_proj": "c_proj"}))),
        LAYERNORM,
        {
            "norm_epsilon": ("layernorm_epsilon", 1e-5),
            "residual_dropout": ("hidden_dropout", 0.0),
            "embedding_dropout": ("embedding_dropout", 0.0),
        },
        {"mlp_type": "default", "norm_type": "layer_norm"},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied=True,
        windows=ALL_LAYERS,
        **one_bias(True),
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        rows_of(GPT_BIGCODE),
        LAYERNORM | {"pos_emb": "learned"},
        EPSILON | {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        {"scale_attn_weights": True, "add_cross_attention": False},
        GPT_NAMES,
        activation=("activation_function", "gelu_pytorch_tanh"),
        tied=True,
        length=1024,
        rope=None,
        read=_gpt_bigcode,
        write=_to_gpt_bigcode,
        harmless=(SUMMARY - {"scale_attn_weights"})
        | {
            *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"),
            *("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "max_sequence_length"),
            *("max_batch_size", "pad_key_length"),
        },
    ),
}
"""`model_type` -> family."""
