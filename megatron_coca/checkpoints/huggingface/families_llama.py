"""Families with LLaMA's names of layers, `model.layers`. Each is a row (see `family_keys.Family`)."""

from collections.abc import Mapping
from typing import Any

from megatron_coca.checkpoints.huggingface import family_tables, weight_map
from megatron_coca.checkpoints.huggingface.family_defaults import (
    BIASES,
    EPS,
    LAYERNORM,
    MLP_BIAS,
    MODERN,
    PLAIN_MLP,
    QKV_BIAS,
    RMS,
    RMS_5,
    NotSupported,
    gemma_scales,
    one_bias,
    rows_of,
    to_gemma_scale,
)
from megatron_coca.checkpoints.huggingface.family_keys import (
    ALL_LAYERS,
    FIRST_OF_PERIOD,
    FIRST_WITHOUT,
    FULL,
    GATED,
    LISTED,
    NO_LAYERS,
    PERIOD_OR_NONE,
    SLIDING,
    WITH_SECTION,
    WITH_WINDOW_IF_ANY,
    Family,
    every,
)
from megatron_coca.checkpoints.huggingface.family_tables import ONE_NORM, renamed, with_norm_bias
from megatron_coca.checkpoints.huggingface.rope import rope_parameters, without_axes
from megatron_coca.checkpoints.huggingface.weight_map import NEIGHBOURS, PRE, QK_HEAD, Row, like_llama
from megatron_coca.config import Config, ModelConfig

Json = Mapping[str, Any]


def _gemma(config: Json, keys: Json) -> dict[str, Any]:
    # As in the class, the name gelu means the tanh approximation.
    named = {"activation": "geglu_tanh"} if config.get("hidden_act") == "gelu" else {}
    return named | {"embedding_scale": float(config["hidden_size"]) ** 0.5}


def _stablelm_rows(model: ModelConfig) -> tuple[Row, ...]:
    norms = ONE_NORM if model.gpt_j_residual else PRE
    return rows_of((*with_norm_bias(like_llama(norms)), *family_tables.norms_of_heads(model)))(model)


def _stablelm(config: Json, keys: Json) -> dict[str, Any]:
    return {
        "qk_norm": "layernorm_by_head" if config.get("qk_layernorm") else None,
        "gpt_j_tied": bool(config.get("use_parallel_residual")),
    }


def _has_qk_layernorm(config: Config) -> dict[str, Any]:
    return {"qk_layernorm": config.model.qk_norm is not None}


def _seed_oss(config: Json, keys: Json) -> dict[str, Any]:
    return {"attention_dropout": float(config.get("attention_dropout", 0.1)), "embedding_dropout": 0.0}


def _hunyuan(config: Json, keys: Json) -> dict[str, Any]:
    """Read `alpha`, with which Hunyuan's class raises the rotary base instead of extending dynamically."""
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    alpha = section.get("alpha")
    if not alpha:
        return {}
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = float(section.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return {"rotary_emb_base": base * alpha ** (width / (width - 2)), "rope_scaling": None}


def _hunyuan_section(section: Json) -> Json:
    """Return Hunyuan's section without the extension that the class ignores if `alpha` is set."""
    if (section.get("rope_type") or section.get("type")) != "dynamic" or not section.get("alpha"):
        return section
    return {name: section[name] for name in ("rope_theta",) if name in section}


def _apertus(config: Json, keys: Json) -> dict[str, Any]:
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise NotSupported("rope_parameters: missing, so the class uses an extension of its own; add the section")
    return {}


def _compass_sections(sections: Json) -> Json:
    """Return the sections without the axes of images, and without the keys beside them, which the class removes."""
    kept = {name: part for name, part in sections.items() if name not in ("rope_type", "rope_theta")}
    return {name: without_axes(part) for name, part in kept.items()}


def _compass(config: Json, keys: Json) -> dict[str, Any]:
    return {"final_logit_scale": config.get("logit_scale") or 1.0}


def _to_compass(config: Config) -> dict[str, Any]:
    kinds, length = config.layer_types, config.model.seq_length
    sections: dict[str, Any] = dict.fromkeys((FULL, SLIDING))
    for kind in kinds.values():
        name = SLIDING if kind.sliding_window_width is not None else FULL
        sections[name] = rope_parameters(kind, length) if kind.embedding.rotary else None
    return {"rope_parameters": sections, "logit_scale": config.model.final_logit_scale}


def _modernbert(config: Json, keys: Json) -> dict[str, Any]:
    """Read the older name of the rotary base of layers without a window. The head must be like the MLP."""
    for head, block, default in (("bias", "mlp_bias", False), ("activation", "hidden_activation", "gelu")):
        if config.get(f"classifier_{head}", default) != config.get(block, default):
            raise NotSupported(f"classifier_{head}: differs from {block}, which is not supported")
    if config.get("rope_scaling") is not None:
        raise NotSupported("rope_scaling: is not supported; move it to the sections of rope_parameters")
    if not config.get("local_attention", 128):
        raise NotSupported(
            "local_attention: null is not supported; set the window, and list full layers in layer_types"
        )
    section = (config.get("rope_parameters") or {}).get(FULL) or {}
    base, slides = config.get("global_rope_theta"), "sliding_window_width" in keys  # in all layers
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
LLAMA_KEYS = RMS_5 | BIASES | MLP_BIAS

LIKE_LLAMA: dict[str, Family] = {
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
        RMS
        | BIASES
        | {
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        windows=every(2),
        window=4096,
        read=gemma_scales,
        write=to_gemma_scale,
        harmless=frozenset({"cache_implementation", "use_bidirectional_attention"}),
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
        write=_has_qk_layernorm,
    ),
    "phi": Family(
        "PhiForCausalLM",
        rows_of(family_tables.PHI),
        LAYERNORM | {"gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_output_head": True},
        EPS | {"resid_pdrop": ("hidden_dropout", 0.0), "embd_pdrop": ("embedding_dropout", 0.0)},
        names={"head_dim": None},
        activation=("hidden_act", "gelu_new"),
        share=0.5,
        read=lambda config, keys: {"qk_norm": "layernorm" if config.get("qk_layernorm") else None},
        write=_has_qk_layernorm,
    ),
    "persimmon": Family(
        "PersimmonForCausalLM",
        rows_of(family_tables.PERSIMMON),
        LAYERNORM,
        EPS,
        {"hidden_dropout": 0.0},
        {"head_dim": None, "num_key_value_heads": None},
        activation=("hidden_act", "relu2"),
        share=0.5,
        read=lambda config, keys: {"qk_norm": "layernorm" if config.get("qk_layernorm", True) else None},
        write=_has_qk_layernorm,
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        rows_of(
            with_norm_bias(renamed(family_tables.ungated(like_llama(PRE)), {"up_proj": "c_fc", "down_proj": "c_proj"}))
        ),
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
    "cohere": Family(
        "CohereForCausalLM",
        rows_of(family_tables.COHERE),
        MODERN | {"norm": "layernorm", "gpt_j_residual": True, "gpt_j_tied": True},
        EPS | {"logit_scale": ("final_logit_scale", 0.0625)} | BIASES,
        {"use_parallel_block": True, "use_gated_activation": True},
        tied=True,
        rope=500000.0,
        read=lambda config, keys: {"qk_norm": "layernorm_by_head" if config.get("use_qk_norm") else None},
        write=lambda config: {"use_qk_norm": config.model.qk_norm is not None},
        harmless=frozenset({"use_embedding_sharing", "use_parallel_embedding", "model_max_length"}),
    ),
    "cohere_compass_text": Family(
        "CohereCompassForCausalLM",
        rows_of(like_llama(ONE_NORM)),
        MODERN | {"norm": "layernorm", "gpt_j_residual": True, "gpt_j_tied": True},
        EPS | BIASES,
        names={"head_dim": None},
        tied=True,
        rope_section=_compass_sections,
        windows=NO_LAYERS,
        window=4096,
        rotating=WITH_SECTION,
        by_type=(None, 10000.0),
        read=_compass,
        write=_to_compass,
        harmless=frozenset({"pooling", "head_dim"}),  # the class computes the width of its heads itself
    ),
    "glm": Family(
        "GlmForCausalLM",
        rows_of(family_tables.packed_gate(like_llama(PRE, NEIGHBOURS))),
        GLM,
        GLM_KEYS,
        head_dim=128,
        share=0.5,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        rows_of(family_tables.packed_gate(like_llama(GLM4_NORMS, NEIGHBOURS))),
        GLM | {"norm_position": "sandwich"},
        GLM_KEYS,
        head_dim=128,
        share=0.5,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        rows_of(like_llama(weight_map.POST | QK_HEAD)),
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
        rope_section=_hunyuan_section,
        read=_hunyuan,
        harmless=frozenset(
            {"eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"}
        ),
    ),
    "nemotron": Family(
        "NemotronForCausalLM",
        rows_of(with_norm_bias(family_tables.ungated(like_llama(PRE)))),
        PLAIN_MLP | {"norm": "layernorm", "use_bias_in_norms": True, "zero_centered_norms": True},
        {"norm_eps": ("layernorm_epsilon", 1e-5)} | BIASES | MLP_BIAS,
        activation=("hidden_act", "relu2"),
        share=0.5,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        rows_of(family_tables.ungated(like_llama(PRE))),
        PLAIN_MLP,
        LLAMA_KEYS,
        activation=("hidden_act", "relu2"),
    ),
    "apertus": Family(
        "ApertusForCausalLM",
        rows_of(family_tables.APERTUS),
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
    "olmo": Family(
        "OlmoForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN | {"norm": "non_parametric_layernorm", "layernorm_epsilon": 1e-5},
        BIASES | {"clip_qkv": ("clip_qkv", None)},
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS,
        windows=LISTED,
        window=4096,
    ),
    "nanochat": Family(
        "NanoChatForCausalLM",
        rows_of(
            renamed(
                family_tables.ungated(like_llama(PRE, family_tables.SWAPPED)),
                {"up_proj": "fc1", "down_proj": "fc2"},
            )
        ),
        PLAIN_MLP | {"norm": "non_parametric_rmsnorm", "use_embedding_norm": True} | AFTER,
        RMS | BIASES | {"final_logit_softcapping": ("final_logit_softcapping", 15.0)},
        activation=("hidden_act", "relu2"),
    ),
    "jais2": Family(
        "Jais2ForCausalLM",
        rows_of(with_norm_bias(family_tables.ungated(like_llama(PRE)))),
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
    "modernbert-decoder": Family(
        "ModernBertDecoderForCausalLM",
        rows_of(family_tables.MODERNBERT),
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
}
"""`model_type` -> family."""
