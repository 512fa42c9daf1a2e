"""Dense families of other makers that name their layers `model.layers`, as LLaMA does. Each family is a row of
`FAMILIES` (see `keys.Family`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    BIASES,
    EPS,
    LAYERNORM,
    MLP_BIAS,
    MODERN,
    PLAIN_MLP,
    QKV_BIAS,
    RMS,
    RMS_5,
    Json,
    NotSupported,
    has_qk_layernorm,
    one_bias,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import (
    FIRST_OF_PERIOD,
    FIRST_WITHOUT,
    FULL,
    GATED,
    PERIOD_OR_NONE,
    ROPE_INTERVAL,
    WITH_WINDOW_IF_ANY,
    WITHOUT_ROTATION,
    Family,
)
from megatron_coca.checkpoints.huggingface.families.parts.tables import (
    EMBEDDING,
    HEAD,
    ONE_NORM,
    QK_LAYERNORM,
    Rows,
    renamed,
    separate,
    ungated,
    with_norm_bias,
)
from megatron_coca.checkpoints.huggingface.weight_map import (
    GATE_FIRST,
    NEIGHBOURS,
    POST,
    PRE,
    QK_HEAD,
    SINGLE,
    Heads,
    Row,
    WeightPacking,
    join_heads,
    layer_rows,
    like_llama,
    shapes_by_head,
    split_heads,
)
from megatron_coca.config import Config, ModelConfig

EACH_HEAD = WeightPacking(
    lambda parts, heads: torch.stack(list(parts)),
    lambda packed, heads, count: packed.unbind(),
    lambda shapes, heads: [shapes[0] or (0,)] * len(shapes),
)
"""Packing of a list with one weight for each head."""


def _swapped(rows: Tensor, heads: int) -> Tensor:
    return rows.view(heads, 2, -1, *rows.shape[1:]).flip(1).reshape(rows.shape)


def _split_swapped(packed: Tensor, heads: Heads, count: int) -> Sequence[Tensor]:
    q, k, v = split_heads(packed, heads, count)
    return [_swapped(q, heads.query), _swapped(k, heads.key), v]


SWAPPED = WeightPacking(
    lambda parts, heads: join_heads([_swapped(parts[0], heads.query), _swapped(parts[1], heads.key), parts[2]], heads),
    _split_swapped,
    shapes_by_head,
)
"""Like BY_HEAD, but for a model that rotates by the negative angle. Swapped halves of heads make the angle positive."""

XIELU = WeightPacking(
    lambda parts, heads: torch.cat([part.view(-1) for part in parts]),
    lambda packed, heads, count: [packed[:1], packed[1:2], packed[2], packed[3]],
    lambda shapes, heads: [(1,), (1,), (), ()],
)
"""The two trained parameters of xIELU, and its two constants."""


def norms_of_heads(model: ModelConfig) -> Rows:
    """Return rows for a norm of each head, as in StableLM."""
    heads = {"query": ("q", model.num_attention_heads), "key": ("k", model.num_kv_heads)}
    return tuple(
        Row(
            f"blocks.{{i}}.attention.{ours}_layernorm.weight",
            tuple(f"model.layers.{{i}}.self_attn.{theirs}_layernorm.norms.{j}.weight" for j in range(count)),
            EACH_HEAD,
        )
        for ours, (theirs, count) in heads.items()
    )


_PERSIMMON = {"attention.query_key_value": "self_attn.query_key_value", "mlp.linear1": "mlp.dense_h_to_4h"}

PERSIMMON = with_norm_bias(
    renamed(
        (
            *(row for row in like_llama(PRE | QK_LAYERNORM) if not any(f".{n}." in row.ours for n in _PERSIMMON)),
            *layer_rows("model.layers.{i}", {ours: (theirs, SINGLE) for ours, theirs in _PERSIMMON.items()}),
        ),
        {"o_proj": "dense", "mlp.down_proj": "mlp.dense_4h_to_h", "model.norm": "model.final_layernorm"},
    )
)

APERTUS = (
    *renamed(
        ungated(like_llama(PRE | QK_HEAD)),
        {"layers.{i}.input_layernorm": "layers.{i}.attention_layernorm"}
        | {"layers.{i}.post_attention_layernorm": "layers.{i}.feedforward_layernorm"},
    ),
    Row(
        "blocks.{i}.mlp.activation.weight",
        tuple(f"model.layers.{{i}}.mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")),
        XIELU,
    ),
)


def _stablelm_rows(model: ModelConfig) -> tuple[Row, ...]:
    norms = ONE_NORM if model.gpt_j_residual else PRE
    return rows_of((*with_norm_bias(like_llama(norms)), *norms_of_heads(model)))(model)


def _stablelm(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "qk_norm": "layernorm_by_head" if config.get("qk_layernorm") else None,
        "gpt_j_tied": bool(config.get("use_parallel_residual")),
    }


def _seed_oss(config: Json, keys: Json) -> dict[str, Any]:
    return {"attention_dropout": float(config.get("attention_dropout", 0.1)), "embedding_dropout": 0.0}


def hunyuan_base(config: Json, keys: Json) -> dict[str, Any]:
    """Read `alpha`, by which Hunyuan's class raises the rotary base, in place of a dynamic extension."""
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha = section.get("alpha")
    if not alpha:
        return {}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = float(section.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return {"rotary_emb_base": base * alpha ** (width / (width - 2)), "rope_scaling": None}


def hunyuan_section(section: Json) -> Json:
    """Return Hunyuan's section without the extension that the class ignores if `alpha` is set."""
    if (section.get("rope_type") or section.get("type")) != "dynamic" or not section.get("alpha"):
        return section
    return {name: section[name] for name in ("rope_theta",) if name in section}


def _apertus(config: Json, keys: Json) -> dict[str, Any]:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise NotSupported("rope_parameters: missing, so the class uses an extension of its own; add the section")
    return {}


_MODERNBERT = {
    EMBEDDING: "model.embeddings.tok_embeddings",
    "embedding.embedding_layernorm": "model.embeddings.norm",
    "norm": "model.final_norm",
    "output_transform.dense": "lm_head.dense",
    "output_transform.norm": "lm_head.norm",
    HEAD: "decoder",
}

MODERNBERT = (
    *separate(
        "model.layers",
        "attn",
        {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
        | {"attention.dense": "attn.Wo", "mlp.linear2": "mlp.Wo"},
        _MODERNBERT,
    ),
    *layer_rows("model.layers.{i}", {"mlp.linear1": ("mlp.Wi", GATE_FIRST)}),
    Row("final_bias", ("decoder.bias",)),
)


def _modernbert(config: Json, keys: Json) -> dict[str, Any]:
    """Read the older name of the rotary base of layers without a window. Raises NotSupported for unsupported values."""
    for head, block, default in (("bias", "mlp_bias", False), ("activation", "hidden_activation", "gelu")):
        if config.get(f"classifier_{head}", default) != config.get(block, default):
            raise NotSupported(f"classifier_{head}: differs from {block}, which is not supported")
    if config.get("rope_scaling") is not None:
        raise NotSupported("rope_scaling: is not supported; move it to the sections of rope_parameters")
    if not config.get("local_attention", 128):
        raise NotSupported(
            "local_attention: null is not supported; set the window, and list full layers in layer_types"
        )
    raw = dict(config)  # with the names in the file; the class also reads the file's sliding_window
    if raw.get("sliding_window") not in (None, raw.get("local_attention", 128) // 2):
        raise NotSupported("sliding_window: differs from half of local_attention; correct one of the two")
    section = (config.get("rope_parameters") or {}).get(FULL) or {}
    base, slides = config.get("global_rope_theta"), "sliding_window_width" in keys  # whether every layer has a window
    return {} if slides or base is None or "rope_theta" in section else {"rotary_emb_base": float(base)}


def _to_modernbert(config: Config) -> dict[str, Any]:
    named = (theirs for theirs, ours in GATED.items() if ours == config.model.activation)
    return {
        "classifier_bias": config.model.use_bias_in_mlp,
        "classifier_activation": next(named, None),
        "rope_scaling": None,  # the class would use it for all layers
    }


HUNYUAN_NORMS = {f"attention.{name}_layernorm": f"self_attn.{name}_layernorm" for name in ("query", "key")}

AFTER = {"qk_norm": "head", "qk_norm_after_rotation": True}

LLAMA_KEYS = RMS_5 | BIASES | MLP_BIAS

FAMILIES: dict[str, Family] = {
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS | BIASES | {"mlp_bias": ("use_bias_in_mlp", False)},
        tied=True,
        rope=2000000.0,
        windows=WITHOUT_ROTATION,
        rotating=ROPE_INTERVAL,
        harmless=frozenset({"no_rope_layer_interval", "max_window_layers"}),
    ),
    "stablelm": Family(
        "StableLmForCausalLM",
        _stablelm_rows,
        MODERN | {"norm": "layernorm", "use_bias_in_norms": True},
        EPS | {"use_qkv_bias": ("use_bias_in_qkv", False), "use_parallel_residual": ("gpt_j_residual", False)},
        {"hidden_dropout": 0.0},
        {"head_dim": None},
        share=0.25,
        read=_stablelm,
        write=has_qk_layernorm,
    ),
    "persimmon": Family(
        "PersimmonForCausalLM",
        rows_of(PERSIMMON),
        LAYERNORM,
        EPS,
        {"hidden_dropout": 0.0},
        {"head_dim": None, "num_key_value_heads": None},
        activation=("hidden_act", "relu2"),
        share=0.5,
        read=lambda config, keys: {"qk_norm": "layernorm" if config.get("qk_layernorm", True) else None},
        write=has_qk_layernorm,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        rows_of(like_llama(POST | QK_HEAD)),
        MODERN | {"norm_position": "post", "qk_norm": "head"},
        RMS_5,
        windows=PERIOD_OR_NONE,
        window=4096,
        rotating=WITH_WINDOW_IF_ANY,
        harmless=frozenset({"sliding_window_pattern"}),
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        rows_of(like_llama(PRE, NEIGHBOURS)),
        MODERN,
        RMS_5,
        names={"attention_dropout": None},
        tied=True,
        head_dim=128,
        rope=500000.0,
        **one_bias(False),
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS
        | MLP_BIAS
        | {
            "attention_bias": ("use_bias_in_qkv", True),
            "attention_out_bias": ("use_bias_in_attn_linear", False),
            "residual_dropout": ("hidden_dropout", 0.1),
        },
        head_dim=128,
        read=_seed_oss,
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        rows_of(like_llama(PRE | HUNYUAN_NORMS)),
        MODERN | AFTER,
        RMS_5 | BIASES,
        {"use_qk_norm": True, "mlp_bias": False, "use_cla": False},
        rope_section=hunyuan_section,
        read=hunyuan_base,
        harmless=frozenset(
            {"eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"}
        ),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        rows_of(with_norm_bias(ungated(like_llama(PRE)))),
        PLAIN_MLP | {"norm": "layernorm", "use_bias_in_norms": True, "zero_centered_norms": True},
        {"norm_eps": ("layernorm_epsilon", 1e-5)} | BIASES | MLP_BIAS,
        activation=("hidden_act", "relu2"),
        share=0.5,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        rows_of(ungated(like_llama(PRE))),
        PLAIN_MLP,
        LLAMA_KEYS,
        activation=("hidden_act", "relu2"),
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        rows_of(APERTUS),
        PLAIN_MLP | {"qk_norm": "head"},
        RMS_5 | BIASES,
        {"qk_norm": True, "post_norm": False, "mlp_bias": False},
        activation=("hidden_act", "xielu"),
        rope=12000000.0,
        read=_apertus,
    ),
    "helium": Family(
        "HeliumForCausalLM",
        rows_of(like_llama(PRE, NEIGHBOURS)),
        MODERN,
        {"rms_norm_eps": ("rms_norm_epsilon", 1e-8)} | QKV_BIAS | MLP_BIAS,
        head_dim=128,
        rope=100000.0,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        rows_of(
            renamed(
                ungated(like_llama(PRE, SWAPPED)),
                {"up_proj": "fc1", "down_proj": "fc2"},
            )
        ),
        PLAIN_MLP | {"norm": "non_parametric_rmsnorm", "use_embedding_norm": True} | AFTER,
        RMS | BIASES | {"final_logit_softcapping": ("final_logit_softcapping", 15.0)},
        activation=("hidden_act", "relu2"),
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        rows_of(with_norm_bias(ungated(like_llama(PRE)))),
        LAYERNORM,
        EPS | {"attention_bias": ("use_bias_in_attn_linear", True), "mlp_bias": ("use_bias_in_mlp", True)},
        activation=("hidden_act", "relu2"),
    ),
    "cwm": Family(
        "CwmForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS_5 | MLP_BIAS,
        head_dim=128,
        rope=1000000.0,
        windows=FIRST_WITHOUT,
        window=8192,
        read=_apertus,
    ),
    "internlm3": Family(
        "LlamaForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        LLAMA_KEYS,
        head_dim=128,
    ),
    "iquestcoder": Family(
        "LlamaForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        LLAMA_KEYS,
        {"clip_qkv": None, "use_sliding_window": False},
        head_dim=128,
    ),
    "modernbert-decoder": Family(
        "ModernBertDecoderForCausalLM",
        rows_of(MODERNBERT),
        MODERN
        | {"norm": "layernorm", "use_embedding_norm": True, "skip_first_norm": True, "use_output_transform": True},
        {
            "norm_eps": ("layernorm_epsilon", 1e-5),
            "norm_bias": ("use_bias_in_norms", False),
            "decoder_bias": ("use_bias_in_output_head", True),
            "embedding_dropout": ("embedding_dropout", 0.0),
        }
        | BIASES
        | MLP_BIAS,
        {"attention_dropout": 0.0, "mlp_dropout": 0.0},
        {"sliding_window": "local_attention", "head_dim": None, "num_key_value_heads": None},
        activation=("hidden_activation", "gelu"),
        tied=True,
        rope=160000.0,
        windows=FIRST_OF_PERIOD,
        window=128,
        by_type=("local_rope_theta", 10000.0),
        read=_modernbert,
        write=_to_modernbert,
        harmless=frozenset({"sliding_window", "initializer_cutoff_factor", "cls_token_id", "classifier_pooling"}),
    ),
}
"""`model_type` -> family."""
