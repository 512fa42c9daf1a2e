"""Families of Cohere. Each family is a row of `FAMILIES` (see `keys.Family`)."""

from typing import Any

from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import BIASES, EPS, MODERN, Json, rows_of
from megatron_coca.checkpoints.huggingface.families.parts.keys import (
    FULL,
    NO_LAYERS,
    SLIDING,
    WITH_SECTION,
    WITH_WINDOW,
    Family,
    every,
)
from megatron_coca.checkpoints.huggingface.families.parts.tables import ONE_NORM
from megatron_coca.checkpoints.huggingface.rope import rope_parameters, without_axes
from megatron_coca.checkpoints.huggingface.weight_map import (
    NEIGHBOURS,
    Heads,
    WeightPacking,
    in_halves,
    in_pairs,
    layer_rows,
    like_llama,
)
from megatron_coca.config import Config


def _of_features(weight: Tensor, heads: Heads, halves: bool) -> Tensor:
    turned = (in_halves if halves else in_pairs)(weight.flatten(), weight.numel() // weight.shape[-1], heads.rotated)
    return turned.view(weight.shape)


NEIGHBOUR_FEATURES = WeightPacking(
    lambda parts, heads: _of_features(parts[0], heads, True),
    lambda packed, heads, count: [_of_features(packed, heads, False)],
)
"""A weight [..., head_dim] of a norm, in a model that rotates pairs of neighbouring features."""

COHERE = (
    *like_llama(ONE_NORM, NEIGHBOURS),
    *layer_rows(
        "model.layers.{i}",
        {
            f"attention.{ours}_layernorm": (f"self_attn.{theirs}_norm", NEIGHBOUR_FEATURES)
            for ours, theirs in (("query", "q"), ("key", "k"))
        },
    ),
)


def _compass_sections(sections: Json) -> Json:
    """Return the sections without the axes of images. Keys beside them, which the class ignores, are dropped."""
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


FAMILIES: dict[str, Family] = {
    "cohere2": Family(
        "Cohere2ForCausalLM",
        rows_of(like_llama({"input_layernorm": "input_layernorm"}, NEIGHBOURS)),
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
    "cohere": Family(
        "CohereForCausalLM",
        rows_of(COHERE),
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
}
"""`model_type` -> family."""
