"""Families of BLOOM, Falcon and MPT. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    EPSILON,
    LAYERNORM,
    Json,
    NotSupported,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.weight_map import (
    FUSED,
    SINGLE,
    Heads,
    Row,
    WeightPacking,
    join_heads,
    modules_of,
    shape_fused,
    split_heads,
    transformer,
)
from megatron_coca.config import Config


def _join_groups(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Pack the rows of a matrix with [queries of a key head | key | value] for each key head, as in Falcon 40B."""
    (rows,) = parts
    groups = rows.view(heads.key, heads.query // heads.key + 2, -1, *rows.shape[1:])
    kinds = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return join_heads([kind.reshape(-1, *rows.shape[1:]) for kind in kinds], heads)


def _split_groups(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    parts = (part.view(heads.key, -1, *packed.shape[1:]) for part in split_heads(packed, heads, 3))
    return [torch.cat(list(parts), dim=1).reshape(packed.shape)]


GROUPED = WeightPacking(_join_groups, _split_groups, shape_fused)

MPT = transformer(
    "blocks",
    "wte",
    modules_of("norm_1 norm_2 attn.Wqkv attn.out_proj ffn.up_proj ffn.down_proj", query_key_value=FUSED),
    ("norm", "norm_f"),
)

_BLOOM = (
    "input_layernorm post_attention_layernorm self_attention.query_key_value self_attention.dense mlp.dense_h_to_4h"
    " mlp.dense_4h_to_h"
)

_BLOOM_EMBEDDING_NORM = ("embedding.embedding_layernorm", "word_embeddings_layernorm")

BLOOM = transformer("h", "word_embeddings", modules_of(_BLOOM), _BLOOM_EMBEDDING_NORM, ("norm", "ln_f"))


def falcon(parallel: bool, norms: int) -> tuple[Row, ...]:
    """Return Falcon's table for parallel or sequential blocks with one or two norms."""
    modules = modules_of(_BLOOM, query_key_value=GROUPED)
    if norms == 1:
        del modules["post_attention_layernorm"]
    elif parallel:
        modules |= {"input_layernorm": ("ln_attn", SINGLE), "post_attention_layernorm": ("ln_mlp", SINGLE)}
    return transformer("h", "word_embeddings", modules, ("norm", "ln_f"))


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
    "mpt": Family(
        "MptForCausalLM",
        rows_of(MPT),
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
        rows_of(BLOOM),
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
        lambda model: falcon(model.gpt_j_residual, 1 if model.gpt_j_residual and model.gpt_j_tied else 2),
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
}
"""`model_type` -> family."""
