"""Families with GPT-2's names of layers, `transformer.h`, or fairseq's. Each is a row (see `family_keys.Family`)."""

from collections.abc import Mapping
from typing import Any

from megatron_coca.checkpoints.huggingface import family_tables
from megatron_coca.checkpoints.huggingface.family_defaults import EPSILON, LAYERNORM, NotSupported, rows_of
from megatron_coca.checkpoints.huggingface.family_keys import Family
from megatron_coca.checkpoints.huggingface.rope import MAXIMUM
from megatron_coca.checkpoints.huggingface.weight_map import NEIGHBOURS
from megatron_coca.config import Config
from megatron_coca.config.model import GLOBAL

Json = Mapping[str, Any]
LOCAL = "local"
"""Name of the layers with a window, in GPT-Neo's config.json and here."""
OFFSET = 2
"""Rows of the position table before the row of position 0, in fairseq's models."""


def _gptj(config: Json, keys: Json) -> dict[str, Any]:
    width, rotated = config["hidden_size"] // config["num_attention_heads"], config.get("rotary_dim", 64)
    if rotated is None:
        raise NotSupported("rotary_dim: null is not supported, because the class then uses the angles of another width")
    return {"rotary_pct": min(rotated / width, 1.0)}


def _to_gptj(config: Config) -> dict[str, Any]:
    return {"rotary_dim": int(config.model.head_dim * config.position.rotary_pct)}


def _gpt_bigcode(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "num_kv_heads": 1 if config.get("multi_query", True) else config["num_attention_heads"],
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


def _to_gpt_bigcode(config: Config) -> dict[str, Any]:
    return {"multi_query": config.model.num_kv_heads == 1}


def _gpt_neo(config: Json, keys: Json) -> dict[str, Any]:
    """Read which layers have a window: `attention_types` lists groups of types, each with its number of repetitions."""
    groups = config.get("attention_types") or [[["global", LOCAL], config["num_hidden_layers"] // 2]]
    names = [name for group, count in groups for name in group * count]
    unknown = sorted(set(names) - {"global", LOCAL})
    if unknown or len(names) != config["num_hidden_layers"]:
        raise NotSupported("attention_types: must name each layer global or local; correct the list")
    width = {"sliding_window_width": config.get("window_size", 256) - 1}
    found: dict[str, Any] = {"max_position_embeddings": config[MAXIMUM]}
    if set(names) == {LOCAL}:
        return found | width
    if LOCAL in names:
        found |= {"attention_config": [[names, 1]], "layer_types": {LOCAL: width}}
    return found


def _to_gpt_neo(config: Config) -> dict[str, Any]:
    kinds, names = config.layer_types, config.model.layer_names
    widths = [kind.sliding_window_width for kind in kinds.values() if kind.sliding_window_width is not None]
    local = [LOCAL if kinds[name].sliding_window_width is not None else GLOBAL for name in names]
    return {
        "attention_types": [[local, 1]],
        "attention_layers": local,
        "window_size": widths[0] + 1 if widths else 256,
    }


def _opt(config: Json, keys: Json) -> dict[str, Any]:
    before, width = config.get("do_layer_norm_before", True), config.get("word_embed_proj_dim")
    bias, plain = bool(config.get("enable_bias", True)), not config.get("layer_norm_elementwise_affine", True)
    found: dict[str, Any] = dict.fromkeys(("use_bias_in_attn_linear", "use_bias_in_mlp"), bias)
    found |= {"embedding_width": None if width == config["hidden_size"] else width}
    found |= {"norm_position": "pre" if before else "residual"}
    return found | _fairseq_positions(config, keys) | ({"norm": "non_parametric_layernorm"} if plain else {})


def _to_opt(config: Config) -> dict[str, Any]:
    return {
        "enable_bias": config.model.use_bias_in_mlp,
        "layer_norm_elementwise_affine": config.model.norm == "layernorm",
        "word_embed_proj_dim": config.model.token_width,
        "do_layer_norm_before": config.model.norm_position != "residual",
    }


GPT1_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}
"""The names of activations that GPT-1's class knows -> their usual names."""


def _openai_gpt(config: Json, keys: Json) -> dict[str, Any]:
    named = config.get("afn", "gelu")
    if named not in GPT1_ACTIVATIONS:
        raise NotSupported(f"afn: {named!r} is not supported; supported values: {', '.join(GPT1_ACTIVATIONS)}")
    return {
        "bias_gelu_fusion": named == "gelu",  # the class uses the approximation
        "max_position_embeddings": config[MAXIMUM],
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
    }


def _to_openai_gpt(config: Config) -> dict[str, Any]:
    model = config.model
    named = model.activation if model.activation != "gelu" or model.bias_gelu_fusion else None
    return {"afn": "silu" if named == "swish" else named}


def _fairseq_positions(config: Json, keys: Json) -> dict[str, Any]:
    return {"max_position_embeddings": config[MAXIMUM] + OFFSET, "opt_pos_emb_offset": OFFSET}


def _biogpt(config: Json, keys: Json) -> dict[str, Any]:
    scale = float(config["hidden_size"]) ** 0.5 if config.get("scale_embedding", True) else 1.0
    dropout = float(config.get("attention_dropout", 0.1))
    return {"embedding_scale": scale, "attention_dropout": dropout} | _fairseq_positions(config, keys)


def _xglm(config: Json, keys: Json) -> dict[str, Any]:
    # The last frequency is 1 / 10000, one step later than with the base 10000.
    pairs = config["hidden_size"] // 2
    scale = float(config["hidden_size"]) ** 0.5 if config.get("scale_embedding", True) else 1.0
    return {
        "embedding_scale": scale,
        "attention_dropout": float(config.get("attention_dropout", 0.1)),
        "sinusoidal_base": 10000.0 ** (pairs / (pairs - 1)),
        "opt_pos_emb_offset": OFFSET,
    }


def _to_biogpt(config: Config) -> dict[str, Any]:
    return {"scale_embedding": config.model.embedding_scale != 1.0}


GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "attention_dropout": "attn_pdrop",
    "num_key_value_heads": None,
}
DROPOUTS = {"resid_pdrop": ("hidden_dropout", 0.0), "embd_pdrop": ("embedding_dropout", 0.0)}
SUMMARY = frozenset(
    {
        *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        *("n_ctx", "gradient_checkpointing", "rotary", "scale_attn_weights"),
    }
)
GPTJ = LAYERNORM | {
    "use_bias_in_attn_linear": False,
    "gpt_j_residual": True,
    "gpt_j_tied": True,
    "use_bias_in_output_head": True,
    "pos_emb": "rotary",
}
FAIRSEQ = LAYERNORM | {"pos_emb": "learned", "layernorm_epsilon": 1e-5}

LIKE_GPT: dict[str, Family] = {
    "gptj": Family(
        "GPTJForCausalLM",
        rows_of(family_tables.gptj(NEIGHBOURS, "q_proj", "k_proj", "v_proj")),
        GPTJ,
        EPSILON | DROPOUTS,
        names=GPT_NAMES,
        activation=("activation_function", "gelu_new"),
        length=2048,
        rope=None,
        read=_gptj,
        write=_to_gptj,
        harmless=SUMMARY | {"tokenizer_class"},
    ),
    "codegen": Family(
        "CodeGenForCausalLM",
        rows_of(family_tables.gptj(family_tables.CODEGEN, "qkv_proj")),
        GPTJ,
        EPSILON | DROPOUTS,
        names=GPT_NAMES,
        activation=("activation_function", "gelu_new"),
        length=2048,
        rope=None,
        read=_gptj,
        write=_to_gptj,
        harmless=SUMMARY,
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        rows_of(family_tables.GPT_BIGCODE),
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
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        rows_of(family_tables.GPT_NEO),
        LAYERNORM | {"pos_emb": "learned", "use_bias_in_qkv": False, "softmax_scale": 1.0},
        EPSILON | {"resid_dropout": ("hidden_dropout", 0.0), "embed_dropout": ("embedding_dropout", 0.0)},
        names={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": None},
        activation=("activation_function", "gelu_new"),
        tied=True,
        length=2048,
        rope=None,
        read=_gpt_neo,
        write=_to_gpt_neo,
        harmless=SUMMARY | {"attention_layers"},
    ),
    "opt": Family(
        "OPTForCausalLM",
        lambda model: rows_of(family_tables.opt(model))(model),
        FAIRSEQ,
        {"dropout": ("hidden_dropout", 0.1)},
        {"_remove_final_layer_norm": False, "layerdrop": 0.0},
        {"intermediate_size": "ffn_dim", "num_key_value_heads": None},
        activation=("activation_function", "relu"),
        tied=True,
        length=2048,
        rope=None,
        read=_opt,
        write=_to_opt,
        harmless=frozenset({"init_std", "activation_dropout"}),
    ),
    "openai-gpt": Family(
        "OpenAIGPTLMHeadModel",
        rows_of(family_tables.OPENAI_GPT),
        LAYERNORM | {"pos_emb": "learned", "norm_position": "residual"},
        EPSILON | {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        names=GPT_NAMES | {"intermediate_size": None},
        activation=("afn", "gelu"),
        tied=True,
        length=512,
        rope=None,
        read=_openai_gpt,
        write=_to_openai_gpt,
        harmless=SUMMARY | {"n_special", "predict_special_tokens"},
    ),
    "ctrl": Family(
        "CTRLLMHeadModel",
        rows_of(family_tables.CTRL),
        LAYERNORM | {"pos_emb": "sinusoidal", "layernorm_epsilon": 1e-6, "use_bias_in_output_head": True},
        {"resid_pdrop": ("hidden_dropout", 0.1), "embd_pdrop": ("embedding_dropout", 0.1)},
        {"layer_norm_epsilon": 1e-6},  # the class reads it only for the last norm
        GPT_NAMES | {"intermediate_size": "dff", "attention_dropout": None},
        activation=(None, "relu"),
        tied=True,
        length=256,
        rope=None,
        read=lambda config, keys: {"embedding_scale": float(config["hidden_size"]) ** 0.5},
        harmless=SUMMARY | {"attn_pdrop", "from_tf", "output_past", "num_labels"},
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        rows_of(family_tables.fairseq("model", "layer_norm")),
        FAIRSEQ | {"pos_emb": "sinusoidal"},
        {"dropout": ("hidden_dropout", 0.1)},
        {"layerdrop": 0.0, "activation_dropout": 0.0, "add_cross_attention": False},
        {
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
            "num_key_value_heads": None,
        },
        activation=("activation_function", "gelu"),
        tied=True,
        length=2048,
        rope=None,
        read=_xglm,
        write=_to_biogpt,
        harmless=frozenset({"init_std"}),
    ),
    "biogpt": Family(
        "BioGptForCausalLM",
        rows_of(family_tables.fairseq("biogpt", "layer_norm", "output_projection")),
        FAIRSEQ,
        {"hidden_dropout_prob": ("hidden_dropout", 0.1)},
        {"layerdrop": 0.0, "activation_dropout": 0.0},
        {"attention_dropout": "attention_probs_dropout_prob", "num_key_value_heads": None},
        activation=("hidden_act", "gelu"),
        tied=True,
        length=1024,
        rope=None,
        read=_biogpt,
        write=_to_biogpt,
        harmless=frozenset({"layer_norm_eps"}),
    ),
}
"""`model_type` -> family."""
