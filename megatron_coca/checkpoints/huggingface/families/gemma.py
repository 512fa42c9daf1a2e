"""Families of Gemma.

Each family is a row of `FAMILIES` (see `keys.Family`). Of Gemma 4, only the dense text networks are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    BIASES,
    MODERN,
    RMS,
    Json,
    NotSupported,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import FULL, SLIDING, Family, Windows, every
from megatron_coca.checkpoints.huggingface.rope import rope_parameters
from megatron_coca.checkpoints.huggingface.unsupported_types import EXPERTS
from megatron_coca.checkpoints.huggingface.weight_map import (
    BY_HEAD,
    PRE,
    QK_HEAD,
    SANDWICH,
    Heads,
    Row,
    WeightPacking,
    like_llama,
)
from megatron_coca.config import Config, ModelConfig
from megatron_coca.config.model import GLOBAL

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
    # In this class, the name gelu means the tanh approximation.
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


# Gemma 4 --------------------------------------------------------------------------------------------------------------

Heading = tuple[int, int]
"""Features per head, and number of key heads."""
PROPORTIONAL = "proportional"
SECTIONS: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""The default of rope_parameters."""


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _packing(heads: Heads, separate: bool) -> WeightPacking:
    """Return the packing of a layer with these heads. Without `separate` values, only queries and keys are packed."""
    if separate:
        return WeightPacking(
            lambda parts, _: BY_HEAD.join(parts, heads),
            lambda packed, _, count: BY_HEAD.split(packed, heads, count),
            lambda shapes, _: BY_HEAD.wanted(shapes, heads),
        )
    counts = (heads.query, heads.key)
    return WeightPacking(
        lambda parts, _: _joined(parts),
        lambda packed, _, count: packed.split([len(packed) * part // sum(counts) for part in counts]),
        lambda shapes, _: BY_HEAD.wanted(shapes, heads)[:2],
    )


def _projections(model: ModelConfig) -> Iterator[Row]:
    """Yield the rows of queries, keys and values, which differ by layer."""
    for number, layer_type in enumerate(model.layer_names):
        shape = model.with_heads(layer_type)
        heads = Heads(shape.num_attention_heads, shape.num_kv_heads, shape.head_dim)
        packing = _packing(heads, not shape.values_from_keys)
        names = [f"model.layers.{number}.self_attn.{name}_proj" for name in "qkv"[: 2 if shape.values_from_keys else 3]]
        for kind in ("weight", "bias"):
            ours = f"blocks.{number}.attention.query_key_value.{kind}"
            yield Row(ours, tuple(f"{name}.{kind}" for name in names), packing)


def _gemma4_rows(model: ModelConfig) -> tuple[Row, ...]:
    shared = (row for row in like_llama(SANDWICH | QK_HEAD) if ".query_key_value." not in row.ours)
    scale = Row("blocks.{i}.layer_scale.weight", ("model.layers.{i}.layer_scalar",))
    return (*shared, scale, *_projections(model))


def _last_full(config: Json, count: int) -> list[bool]:
    return [*every(6).read(config, count)[:-1], False]


LAST_FULL = Windows(_last_full)
"""Every sixth layer and always the last layer have no window. The class removes a listed window of the last layer."""


def _sections(sections: Json) -> Json:
    """Return the sections without p-RoPE, which `_extensions` reads."""
    return {
        kind: {"rope_theta": part["rope_theta"]} if _is_proportional(part) else part
        for kind, part in (sections or SECTIONS).items()
    }


def _is_proportional(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("rope_type") == PROPORTIONAL


def _extensions(config: Json) -> dict[str, dict[str, Any]]:
    """Return our key of p-RoPE for each type of layer that has it."""
    found: dict[str, dict[str, Any]] = {}
    for kind, part in (config.get("rope_parameters") or SECTIONS).items():
        if _is_proportional(part):
            share = {"proportion": float(part.get("partial_rotary_factor", 1.0))}
            found[kind] = {"rope_type": PROPORTIONAL, "factor": float(part.get("factor", 1.0))} | share
    return found


def _headings(config: Json, sliding: list[bool]) -> dict[bool, Heading]:
    """Return the heads of layers with a window (True) and without one (False).

    If transformers saved the config.json, `per_layer_config` in it lists the changes of each layer. In a published
    config.json, keys with `global` in their names apply to the layers without a window.
    """
    own: Heading = (config.get("head_dim", 256), config.get("num_key_value_heads", 4))
    changes, width, keys = config.get("per_layer_config"), config.get("global_head_dim", 512), None
    if config.get("attention_k_eq_v"):
        keys = config.get("num_global_key_value_heads")
    if changes is None:
        return {True: own, False: (width, keys or own[1])}
    found: dict[bool, Heading] = {}
    for number, slides in enumerate(sliding):
        change = dict(changes.get(str(number), changes.get(number)) or {})
        heading = change.pop("head_dim", own[0]), change.pop("num_key_value_heads", own[1])
        if change:
            raise NotSupported(f"per_layer_config: {min(change)} is not supported, only head_dim, num_key_value_heads")
        if found.setdefault(slides, heading) != heading:
            raise NotSupported("per_layer_config: the heads of two layers of the same type differ")
    return {True: own, False: own} | found


def _check_dense(config: Json, defaults: Json) -> None:
    """Raise NotSupported if the network is not a dense decoder. `defaults` are those of the class."""
    reasons = {
        "hidden_size_per_layer_input": "each layer has an input of its own",
        "num_kv_shared_layers": "layers share keys and values",
        "enable_moe_block": EXPERTS,
    }
    for name, reason in reasons.items():
        if value := config.get(name, defaults.get(name)):
            raise NotSupported(f"{name}: {value!r} is not supported, because {reason}")
    if config.get("rope_scaling"):
        raise NotSupported("rope_scaling: not supported, because the class reads rope_parameters; move it there")
    if config.get("use_bidirectional_attention") == "all":
        raise NotSupported("use_bidirectional_attention: 'all' is not supported, because attention is not causal")


def _gemma4(config: Json, keys: Json, defaults: Json) -> dict[str, Any]:
    _check_dense(config, defaults)
    layers = config["num_hidden_layers"]
    extensions, headings = _extensions(config), _headings(config, _last_full(config, layers))
    width, key_heads = headings[False]
    tied = bool(config.get("attention_k_eq_v"))
    found = {
        "kv_channels": width,
        "num_kv_heads": key_heads,
        "values_from_keys": tied,
        "embedding_scale": float(config["hidden_size"]) ** 0.5,
        "rope_scaling": extensions.get(FULL, keys.get("rope_scaling")),
    }
    if "layer_types" not in keys:
        return found
    sliding = {"kv_channels": headings[True][0], "num_kv_heads": headings[True][1], "values_from_keys": False}
    differing = {name: value for name, value in sliding.items() if found[name] != value}
    types = {
        name: changes | ({"rope_scaling": extensions[SLIDING]} if SLIDING in extensions else {})
        for name, changes in keys["layer_types"].items()
    }
    return found | {"layer_types": types, "head_shapes": dict.fromkeys(types, differing) if differing else {}}


def _section(config: Config, name: str) -> dict[str, Any]:
    """Return the section of rope_parameters for layers of one type."""
    section = rope_parameters(config.layer_types[name], config.model.seq_length)
    share = section.pop("proportion", None)
    if share is not None and section.get("factor") == 1:
        del section["factor"]
    return section | ({} if share is None else {"partial_rotary_factor": share})


def _to_gemma4(config: Config, defaults: Json) -> dict[str, Any]:
    model, kinds = config.model, config.layer_types
    slides = {name: kind.sliding_window_width is not None for name, kind in kinds.items()}
    full, window = (next((name for name in kinds if slides[name] == flag), None) for flag in (False, True))
    full, window = full or GLOBAL, window or full or GLOBAL
    wide, narrow = model.with_heads(full), model.with_heads(window)
    settings = {
        "rope_parameters": {FULL: _section(config, full), SLIDING: _section(config, window)},
        "head_dim": narrow.head_dim,
        "num_key_value_heads": narrow.num_kv_heads,
        "global_head_dim": wide.head_dim,
        "attention_k_eq_v": wide.values_from_keys,
        "num_kv_shared_layers": 0,
    }
    settings |= {name: 0 for name in defaults if name == "hidden_size_per_layer_input"}
    if wide.values_from_keys:
        return settings | {"num_global_key_value_heads": wide.num_kv_heads}
    if wide.num_kv_heads == narrow.num_kv_heads:
        return settings
    # The class reads `num_global_key_value_heads` only if keys serve as values, so other models list the heads of each
    # layer.
    change = {"head_dim": wide.head_dim, "num_key_value_heads": wide.num_kv_heads}
    numbers = (number for number, name in enumerate(model.layer_names) if not slides[name])
    return settings | {"per_layer_config": {str(number): change for number in numbers}}


def _gemma4_family(architecture: str, window: int, defaults: Json) -> Family:
    return Family(
        architecture,
        _gemma4_rows,
        MODERN
        | {"norm_position": "sandwich", "qk_norm": "head", "value_norm": True, "layer_scale": True}
        | {"softmax_scale": 1.0},
        RMS | BIASES | {"final_logit_softcapping": ("final_logit_softcapping", None)},
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
        head_dim=256,
        rope_section=_sections,
        windows=LAST_FULL,
        window=window,
        by_type=(None, 10000.0),
        in_older=False,
        read=lambda config, keys: _gemma4(config, keys, defaults),
        write=lambda config: _to_gemma4(config, defaults),
        harmless=frozenset(
            {
                *("vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts"),
                *("moe_intermediate_size", "cache_implementation", "global_head_dim", "num_global_key_value_heads"),
            }
        ),
    )


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
    "gemma4_text": _gemma4_family("Gemma4ForCausalLM", 512, {"hidden_size_per_layer_input": 256}),
    "gemma4_unified_text": _gemma4_family("Gemma4UnifiedForCausalLM", 1024, {}),
}
"""`model_type` -> family."""
