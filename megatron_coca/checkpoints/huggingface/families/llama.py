"""LLaMA, and the text network of Llama 4. Folders of LLaMA can also hold CoCA models, so only Llama 4 is a row of
`FAMILIES` (see `keys.Family`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.checkpoints.huggingface.families.parts.defaults import BIASES, MODERN, RMS_5, NotSupported
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    ROUTER_LOSS,
    ExpertNames,
    at_least_two,
    expert_layers,
    with_experts,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import FULL, ConfigReader, Exporter, Family, Json
from megatron_coca.checkpoints.huggingface.families.parts.tables import renamed
from megatron_coca.checkpoints.huggingface.rope import (
    check_spellings,
    older_keys,
    rope_keys,
    rope_parameters,
    rope_section,
)
from megatron_coca.checkpoints.huggingface.weight_map import NEIGHBOURS, PRE, WeightPacking, like_llama, llama
from megatron_coca.config import Config
from megatron_coca.config.model import EXPERTS, GLOBAL
from megatron_coca.config.position import Selected

ACTIVATIONS = ("silu", "swish")  # two names of one function
UNNEEDED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


def other_head_dim(config: Json) -> dict[str, Any]:
    """Return our key of the width of a head, if it is not hidden_size / num_attention_heads."""
    given = config.get("head_dim")
    return {} if given in (None, config["hidden_size"] // config["num_attention_heads"]) else {"kv_channels": given}


def _shape(config: Json, source: Path) -> dict[str, Any]:
    if config.get("hidden_act", "silu") not in ACTIVATIONS:
        raise CheckpointError(
            f"{source}: hidden_act: {config['hidden_act']!r} is not supported for LLaMA; supported values: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return other_head_dim(config) | {
        "activation": "swiglu",
        "intermediate_size": 3 * config["intermediate_size"],  # GPT-NeoX's key is 3 times the width of a gated MLP
        "norm": "rmsnorm",
        "rms_norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "use_bias_in_attn_linear": config.get("attention_bias") or False,
        "use_bias_in_mlp": config.get("mlp_bias") or False,
        "use_bias_in_norms": False,
    }


def _has_t_projection(names: Iterable[str]) -> bool:
    """Return whether a model is a LLaMA model by CoCA's authors, who call the key projection `t_proj`."""
    return any(name.endswith("self_attn.t_proj.weight") for name in names)


def _position(config: Json, source: Path, names: Collection[str]) -> dict[str, Any]:
    check_spellings(config, source, ("rope_theta", 10000.0), ("partial_rotary_factor", 1.0))
    share = rope_section(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise CheckpointError(
            f"{source}: partial_rotary_factor: {share} is not supported, because LLaMA rotates all features; remove it"
        )
    return {"pos_emb": "coca" if _has_t_projection(names) else "rotary", **rope_keys(config, source, "rope_theta")}


def llama_keys(config: Config, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json. `shared` contains the keys that all architectures have."""
    model, rope = config.model, rope_parameters(config.position, config.model.seq_length)
    return shared | {
        "hidden_act": "silu",
        "rms_norm_eps": model.rms_norm_epsilon,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "attention_bias": model.use_bias_in_attn_linear,
        "mlp_bias": model.use_bias_in_mlp,
        "rope_parameters": rope,
        **older_keys(rope),
    }


READER = ConfigReader(
    _shape,
    _position,
    lambda config, names: llama("t_proj" if _has_t_projection(names) else "k_proj"),
    UNNEEDED,
)
EXPORTER = Exporter("LlamaForCausalLM", lambda config: llama("k_proj"), llama_keys)


# Llama 4 --------------------------------------------------------------------------------------------------------------

CHUNKED = "chunked_attention"

COLUMNS = WeightPacking(
    lambda parts, heads: parts[0].mT.contiguous(), lambda packed, heads, count: [packed.mT.contiguous()]
)
"""The matrices of all experts in one tensor [experts, in, out]."""
GATES_FIRST = WeightPacking(
    lambda parts, heads: torch.cat(parts[0].mT.chunk(2, dim=1)[::-1], dim=1),
    lambda packed, heads, count: [torch.cat(packed.chunk(2, dim=1)[::-1], dim=1).mT.contiguous()],
)
"""Like COLUMNS, but the columns of the gate precede those of the up projection."""
LLAMA4 = with_experts(
    renamed(like_llama(PRE, NEIGHBOURS), {".mlp.": ".feed_forward."}),
    ExpertNames(
        "model.layers.{i}.feed_forward",
        router="router",
        whole=(("experts.gate_up_proj", GATES_FIRST), ("experts.down_proj", COLUMNS)),
        shared="shared_expert",
    ),
)


def _rotating(config: Json) -> list[bool]:
    """Return whether each layer rotates."""
    listed, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval", 4)
    layers = range(config["num_hidden_layers"])
    return [bool(flag) for flag in listed] if listed else [(number + 1) % interval != 0 for number in layers]


def _mixtures(config: Json) -> dict[str, Any]:
    listed, step, layers = (
        config.get("moe_layers"),
        config.get("interleave_moe_layer_step", 1),
        config["num_hidden_layers"],
    )
    chosen = range(step - 1, layers, step) if listed is None else listed
    mixed = [number in chosen for number in range(layers)]
    if not any(mixed):
        raise NotSupported("moe_layers: names no layer, so no layer has experts")
    return expert_layers(mixed)


def _positions(config: Json) -> dict[str, Any]:
    """Return our keys of the types of layers. Layers without rotation may have a temperature."""
    rotating, chunk = _rotating(config), config.get("attention_chunk_size", 8192)
    listed = config.get("layer_types") or [CHUNKED if rotates else FULL for rotates in rotating]
    if unknown := sorted(set(listed) - {CHUNKED, FULL}):
        raise NotSupported(f"layer_types: {unknown[0]!r} is not supported, only {CHUNKED} and {FULL}")
    if not len(rotating) == len(listed) == config["num_hidden_layers"]:
        raise NotSupported("layer_types or no_rope_layers: needs one entry for each layer; correct the list")
    if CHUNKED in listed and chunk is None:
        raise NotSupported(f"attention_chunk_size: null is not supported with layers of type {CHUNKED}")
    strength, period = config.get("attn_scale", 0.1), config.get("floor_scale", 8192)
    tuned = config.get("attn_temperature_tuning", True)
    scaling = {"type": "temperature", "strength": strength, "period": period, "first": 1} if tuned else "none"
    nope = {"pos_emb": "none", "rope_scaling": None, "logit_scaling": scaling}
    kinds: dict[str, Mapping[str, Any]] = {GLOBAL: {}, "chunked": {"attention_chunk_size": chunk}, "nope": nope}
    kinds["chunked_nope"] = {**nope, "attention_chunk_size": chunk}
    names = [
        ("chunked" if kind == CHUNKED else GLOBAL) if rotates else ("chunked_nope" if kind == CHUNKED else "nope")
        for rotates, kind in zip(rotating, listed, strict=True)
    ]
    used = dict.fromkeys(names)
    if len(used) == 1:
        return dict(kinds[names[0]])
    return {
        "attention_config": [[names, 1]],
        "layer_types": {name: dict(kinds[name]) for name in used if name != GLOBAL},
    }


def _llama4(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_local_experts", 16)
    normed, section = config.get("use_qk_norm", True), rope_section(config)
    if normed and (section.get("rope_type") or section.get("type")) in ("yarn", "longrope"):
        raise NotSupported(
            "rope_parameters: yarn and longrope are not supported with use_qk_norm, which removes their scale"
        )
    width = config["intermediate_size"]
    return {
        "unweighted_qk_norm": normed,
        "intermediate_size": 3 * config.get("intermediate_size_mlp", 16384),
        "moe_intermediate_size": width,
        "moe_shared_intermediate_size": width,
        **_mixtures(config),
        **_positions(config),
    }


def _written_llama4(config: Config) -> dict[str, Any]:
    model, kinds = config.model, [config.layer_types[name] for name in config.model.layer_names]
    chunks = [kind.attention_chunk_size for kind in kinds]
    scalings = [kind.logit_scaling for kind in kinds if not kind.embedding.rotary]
    tuned = [each for each in scalings if isinstance(each, Selected) and each.type == "temperature"]
    options = tuned[0].settings(model.seq_length) if tuned else {}
    return {
        "intermediate_size": model.expert_width,
        "intermediate_size_mlp": model.ffn_hidden_size,
        "moe_layers": [number for number, kind in enumerate(model.mlp_names) if kind == EXPERTS],
        "no_rope_layers": [int(kind.embedding.rotary) for kind in kinds],
        "layer_types": [FULL if chunk is None else CHUNKED for chunk in chunks],
        "attention_chunk_size": next(filter(None, chunks), None),
        "use_qk_norm": model.unweighted_qk_norm,
        "attn_temperature_tuning": bool(tuned),
        "attn_scale": options.get("strength", 0.1),
        "floor_scale": options.get("period", 8192),
    }


FAMILIES: dict[str, Family] = {
    "llama4_text": Family(
        "Llama4ForCausalLM",
        LLAMA4,
        MODERN | {"moe_router_scores": "sigmoid", "moe_weights_on_input": True},
        RMS_5 | BIASES | {"num_local_experts": ("moe_num_experts", 16), "num_experts_per_tok": ("moe_top_k", 1)},
        {"router_jitter_noise": 0.0},
        head_dim=128,
        rope=500000.0,
        in_older=False,
        read=_llama4,
        write=_written_llama4,
        harmless=ROUTER_LOSS | {"for_llm_compressor"},
    ),
}
"""`model_type` -> family."""
