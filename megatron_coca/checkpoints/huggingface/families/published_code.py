"""Families without a class in transformers. Their published folders contain the code.

Each family is a row of `FAMILIES` (see `keys.Family`). An export of such a model uses the class of another family that
computes the same function, or our modelling file.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.bloom import GROUPED
from megatron_coca.checkpoints.huggingface.families.parts.defaults import MODERN, RMS, Json, NotSupported, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import EMBEDDING, HEAD, Rows, renamed, separate
from megatron_coca.checkpoints.huggingface.weight_map import (
    FUSED,
    GATE_FIRST,
    NEIGHBOURS,
    PRE,
    SINGLE,
    STACKED,
    Heads,
    Row,
    WeightPacking,
    layer_rows,
    like_llama,
    shape_fused,
    transformer,
)
from megatron_coca.config import ModelConfig


def _up_and_gate(prefix: str, up: str, gate: str) -> Rows:
    """Return the rows of a gated MLP's first layer. `up` and `gate` are the names of its two parts below `prefix`."""
    kinds = ("weight", "bias")
    names = {kind: tuple(f"{prefix}.{name}.{kind}" for name in (up, gate)) for kind in kinds}
    return tuple(Row(f"blocks.{{i}}.mlp.linear1.{kind}", names[kind], STACKED) for kind in kinds)


# InternLM 2 -----------------------------------------------------------------------------------------------------------

INTERNLM2 = (
    *renamed(
        tuple(row for row in like_llama(PRE) if ".linear1." not in row.ours and ".query_key_value." not in row.ours),
        {
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "self_attn.o_proj": "attention.wo",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
    *layer_rows("model.layers.{i}", {"attention.query_key_value": ("attention.wqkv", GROUPED)}),
    *_up_and_gate("model.layers.{i}.feed_forward", "w3", "w1"),
)


# EXAONE 3 -------------------------------------------------------------------------------------------------------------

EXAONE = (
    *separate(
        "transformer.h",
        "attn.attention",
        {
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "attention.dense": "attn.attention.out_proj",
            "mlp.linear2": "mlp.c_proj",
        },
        {EMBEDDING: "transformer.wte", "norm": "transformer.ln_f", HEAD: "lm_head"},
    ),
    *_up_and_gate("transformer.h.{i}.mlp", "c_fc_1", "c_fc_0"),
)


# Qwen 1 ---------------------------------------------------------------------------------------------------------------

QWEN = (
    *transformer(
        "h",
        "wte",
        {
            "input_layernorm": ("ln_1", SINGLE),
            "post_attention_layernorm": ("ln_2", SINGLE),
            "attention.query_key_value": ("attn.c_attn", FUSED),
            "attention.dense": ("attn.c_proj", SINGLE),
            "mlp.linear2": ("mlp.c_proj", SINGLE),
        },
        ("norm", "ln_f"),
    ),
    *_up_and_gate("transformer.h.{i}.mlp", "w1", "w2"),
)


def _qwen(config: Json, keys: Json) -> dict[str, Any]:
    if config.get("use_dynamic_ntk", False):
        raise NotSupported(
            "use_dynamic_ntk: true is not supported, because it raises the rotary base in steps beyond seq_length; "
            "ignore it with --ignore-key use_dynamic_ntk, which changes only longer texts"
        )
    logn = {"logit_scaling": "log_n"} if config.get("use_logn_attn", False) else {}
    # The key intermediate_size counts value and gate together.
    return logn | {
        "rotary_emb_base": float(config.get("rotary_emb_base", 10000.0)),
        "intermediate_size": 3 * (config["intermediate_size"] // 2),
    }


# ChatGLM --------------------------------------------------------------------------------------------------------------


def _rows_of_each(heads: Heads, total: int) -> list[int]:
    width = total // (heads.query + 2 * heads.key)
    return [heads.query * width, heads.key * width, heads.key * width]


def _join_fused_neighbours(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    return NEIGHBOURS.join(parts[0].split(_rows_of_each(heads, len(parts[0]))), heads)


FUSED_NEIGHBOURS = WeightPacking(
    _join_fused_neighbours, lambda packed, heads, count: [*NEIGHBOURS.split(packed, heads, 3)], shape_fused
)
"""Like FUSED, but for a model that rotates pairs of neighbouring features. Exports do not use it."""

_LAYERS = "encoder.layers"
CHATGLM = renamed(
    transformer(
        _LAYERS,
        "embedding.word_embeddings",
        {
            "input_layernorm": ("input_layernorm", SINGLE),
            "post_attention_layernorm": ("post_attention_layernorm", SINGLE),
            "attention.query_key_value": ("self_attention.query_key_value", FUSED_NEIGHBOURS),
            "attention.dense": ("self_attention.dense", SINGLE),
            "mlp.linear1": ("mlp.dense_h_to_4h", GATE_FIRST),
            "mlp.linear2": ("mlp.dense_4h_to_h", SINGLE),
        },
        ("norm", "encoder.final_layernorm"),
    ),
    {"lm_head": "transformer.output_layer"},
)


def _chatglm(config: Json, keys: Json) -> dict[str, Any]:
    if not config.get("multi_query_attention", False):
        raise NotSupported("multi_query_attention: false is not supported, only true")
    if config.get("rope_ratio", 1.0) != 1 and "chatglm2" in str(config.get("_name_or_path")):
        raise NotSupported("rope_ratio: the code of ChatGLM 2 divides positions by it, which is not supported")
    return {
        "num_kv_heads": config.get("multi_query_group_num", 1),
        "rotary_emb_base": 10000.0 * config.get("rope_ratio", 1.0),
    }


# Baichuan -------------------------------------------------------------------------------------------------------------

SECOND = 125696
"""Number of embedding rows of Baichuan 2. Its output head has rows of length 1, unlike the head of Baichuan 1."""
UNIT_ROWS = WeightPacking(lambda parts, heads: F.normalize(parts[0]), lambda packed, heads, count: [packed])
"""Packing of a matrix in which the model divides each row by its length."""
BAICHUAN = (
    *(row for row in like_llama(PRE) if ".query_key_value." not in row.ours and row.ours != "final_linear.weight"),
    *layer_rows("model.layers.{i}", {"attention.query_key_value": ("self_attn.W_pack", FUSED)}),
)


def _baichuan_rows(model: ModelConfig) -> Rows:
    packing = UNIT_ROWS if model.padded_vocab_size == SECOND else SINGLE
    return (*BAICHUAN, Row("final_linear.weight", ("lm_head.weight",), packing))


def _baichuan(config: Json, keys: Json) -> dict[str, Any]:
    """Read the position method. Only the 7B models rotate, and only they have the key `max_position_embeddings`."""
    if config.get("max_position_embeddings") is not None:
        return {}
    return {"pos_emb": "alibi", "rope_scaling": None, "seq_length": config["model_max_length"]}


FAMILIES: dict[str, Family] = {
    "internlm2": Family(
        "",
        rows_of(INTERNLM2),
        MODERN,
        RMS | {"bias": ("use_bias_in_attn_linear", True)},
        length=2048,
    ),
    "exaone": Family(
        "",
        rows_of(EXAONE),
        MODERN,
        {"layer_norm_epsilon": ("rms_norm_epsilon", 1e-5), "embed_dropout": ("embedding_dropout", 0.0)},
        names={"num_hidden_layers": "num_layers"},
        activation=("activation_function", "silu"),
        length=2048,
    ),
    "xverse": Family(
        "",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS,
        length=2048,
        harmless=frozenset({"max_tokenizer_truncation"}),
    ),
    "qwen": Family(
        "",
        rows_of(QWEN),
        MODERN | {"use_bias_in_qkv": True},
        {"layer_norm_epsilon": ("rms_norm_epsilon", 1e-6), "emb_dropout_prob": ("embedding_dropout", 0.0)},
        {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
        {"max_position_embeddings": "seq_length", "attention_dropout": "attn_dropout_prob", "head_dim": "kv_channels"},
        activation=(None, "silu"),
        read=_qwen,
        harmless=frozenset(
            {
                *("bf16", "fp16", "fp32", "onnx_safe", "softmax_in_fp32", "use_flash_attn", "use_cache_quantization"),
                *("use_cache_kernel", "max_position_embeddings"),
            }
        ),
    ),
    "chatglm": Family(
        "",
        rows_of(CHATGLM),
        MODERN,
        {
            "layernorm_epsilon": ("rms_norm_epsilon", 1e-5),
            "add_qkv_bias": ("use_bias_in_qkv", False),
            "hidden_dropout": ("hidden_dropout", 0.0),
        },
        {
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
            "interleaved_qkv": False,
            "original_rope": True,
            "post_layer_norm": True,
            "pre_seq_len": 0,
            "quantization_bit": 0,
            "rmsnorm": True,
        },
        {
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "seq_length",
            "head_dim": "kv_channels",
        },
        activation=(None, "silu"),
        head_dim=128,
        share=0.5,
        read=_chatglm,
        harmless=frozenset(
            {
                *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion"),
                *("fp32_residual_connection", "prefix_projection", "kv_cache_quantization", "vocab_size"),
            }
        ),
    ),
    "baichuan": Family(
        "",
        _baichuan_rows,
        MODERN,
        RMS,
        length=4096,
        read=_baichuan,
        harmless=frozenset({"model_max_length", "z_loss_weight", "gradient_checkpointing", "_from_model_config"}),
    ),
}
"""`model_type` -> family."""
