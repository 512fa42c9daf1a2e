"""Families with latent attention: DeepSeek, and makers who followed it.

Each family is a row of `FAMILIES` (see `keys.Family`).
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import (
    BIASES,
    MLP_BIAS,
    MODERN,
    RMS,
    RMS_5,
    Json,
    NotSupported,
    rows_of,
)
from megatron_coca.checkpoints.huggingface.families.parts.experts import (
    DEEPSEEK_3,
    ExpertNames,
    at_least_two,
    deepseek_experts,
    deepseek_keys,
    listed_experts,
    shared_experts,
    with_experts,
    written_deepseek_experts,
    written_listed_experts,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import Family
from megatron_coca.checkpoints.huggingface.families.parts.tables import Rows
from megatron_coca.checkpoints.huggingface.weight_map import (
    PRE,
    SINGLE,
    WeightPacking,
    in_halves,
    in_pairs,
    layer_rows,
    like_llama,
)
from megatron_coca.config import Config, ModelConfig

WeightTable = Callable[[ModelConfig], Rows]


def last_in_pairs(heads: int, before: int, rotated: int) -> WeightPacking:
    """Return the packing of a matrix or bias whose rows form `heads` heads.

    Each head has `before` rows, then `rotated` rows in rotary pairs of neighbours. Our pairs are (i, i + rotated / 2).
    """

    def turned(x: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
        each = x.view(heads, -1, *x.shape[1:])
        pairs = each[:, before:]
        return torch.cat((each[:, :before], change(pairs.flatten(0, 1), heads).view(pairs.shape)), 1).reshape(x.shape)

    return WeightPacking(
        lambda parts, sizes: turned(parts[0], in_halves),
        lambda packed, sizes, count: [turned(packed, in_pairs)],
        lambda shapes, sizes: [(heads * (before + rotated), *shapes[0][1:])],
    )


def latent_rows(model: ModelConfig, neighbours: bool) -> Rows:
    """Return the rows of latent attention. `neighbours` is whether the class rotates pairs of neighbouring features."""
    queries = last_in_pairs(model.num_attention_heads, model.unrotated_dim, model.head_dim) if neighbours else SINGLE
    down = last_in_pairs(1, model.kv_lora_rank or 0, model.head_dim) if neighbours else SINGLE
    modules = {
        "key_value_down": ("kv_a_proj_with_mqa", down),
        "key_value_down_layernorm": ("kv_a_layernorm", SINGLE),
        "key_value_up": ("kv_b_proj", SINGLE),
    }
    if model.q_lora_rank is None:
        modules["query"] = ("q_proj", queries)
    else:
        modules |= {"query_down": ("q_a_proj", SINGLE), "query_down_layernorm": ("q_a_layernorm", SINGLE)}
        modules["query_up"] = ("q_b_proj", queries)
    named = {f"attention.{ours}": (f"self_attn.{theirs}", packing) for ours, (theirs, packing) in modules.items()}
    return tuple(layer_rows("model.layers.{i}", named))


def with_latents(table: WeightTable, neighbours: bool = True) -> WeightTable:
    """Return the table of a family with latent attention. `table` is the family's table with ordinary attention."""

    def rows(model: ModelConfig) -> Rows:
        others = [row for row in table(model) if ".attention.query_key_value." not in row.ours]
        return (*others, *latent_rows(model, neighbours))

    return rows


def latent_keys(rank: int, of_queries: int | None, plain: int, rotated: int, value: int) -> dict[str, tuple[str, Any]]:
    """Return the keys of latent attention. The arguments are defaults of the class."""
    return {
        "kv_lora_rank": ("kv_lora_rank", rank),
        "q_lora_rank": ("q_lora_rank", of_queries),
        "qk_nope_head_dim": ("qk_nope_head_dim", plain),
        "qk_rope_head_dim": ("qk_rope_head_dim", rotated),
        "v_head_dim": ("v_head_dim", value),
    }


WIDTHS_OF_HEADS = frozenset({"head_dim", "qk_head_dim"})
"""Keys that the classes compute from other keys."""
FURTHER = frozenset({"output_router_logits", "num_nextn_predict_layers", "num_mtp_layers", "pretraining_tp"})
NEIGHBOURS_ONLY = {"rope_interleave": True}
MIXED = with_latents(with_experts(like_llama(PRE), ExpertNames(shared="shared_experts")))
OWN: dict[str, Any] = {"names": {"head_dim": None}, "of_all_logits": True}
"""Fields that all families in this file share."""


def _deepseek_2(config: Json, keys: Json) -> dict[str, Any]:
    method = config.get("topk_method", "greedy")
    groups: dict[str, Any] = {}
    if method == "group_limited_greedy":
        groups = {"moe_num_groups": config.get("n_group"), "moe_top_k_groups": config.get("topk_group")}
        groups |= {"moe_group_scores": "max"}
    elif method != "greedy":
        raise NotSupported(f"topk_method: {method!r} is not supported, only 'greedy' and 'group_limited_greedy'")
    return deepseek_experts(config, 64, 2, 0, 1407, groups)


def _written_deepseek_2(config: Config) -> dict[str, Any]:
    model = config.model
    groups: dict[str, Any] = {"topk_method": "greedy"}
    if model.moe_num_groups > 1:
        groups = {"topk_method": "group_limited_greedy", "n_group": model.moe_num_groups}
        groups["topk_group"] = model.moe_top_k_groups
    return groups | written_deepseek_experts(config)


def _minicpm3(config: Json, keys: Json) -> dict[str, Any]:
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    depth, base = config.get("scale_depth", 1.4), config.get("dim_model_base", 256)
    width = config.get("v_head_dim")
    return {
        "residual_scale": 1.0 if depth is None else depth / sqrt(layers),
        "final_logit_scale": 1.0 if base is None else base / hidden,
        "v_head_dim": hidden // config["num_attention_heads"] if width is None else width,
    }


def _written_minicpm3(config: Config) -> dict[str, Any]:
    model = config.model
    depth = model.residual_scale * sqrt(model.num_layers)
    short = float(f"{depth:.12g}")  # the value of scale_depth before an import divided it
    return {
        "scale_depth": short if short / sqrt(model.num_layers) == model.residual_scale else depth,
        "dim_model_base": round(model.final_logit_scale * model.hidden_size),
    }


def _glm4_moe_lite(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "n_routed_experts", 64)
    return dict(DEEPSEEK_3) | shared_experts(config, 1, 1536) | listed_experts(config, 1)


def _written_glm4_moe_lite(config: Config) -> dict[str, Any]:
    return written_listed_experts(config, "n_shared_experts")


def group_keys(count: int, chosen: int, factor: float) -> dict[str, tuple[str, Any]]:
    """Return the keys for groups of experts and for the factor on their weights. The arguments are class defaults."""
    return {
        "n_group": ("moe_num_groups", count),
        "topk_group": ("moe_top_k_groups", chosen),
        "routed_scaling_factor": ("moe_routed_scaling_factor", factor),
    }


def _without(keys: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keys.items() if name not in names}


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        MIXED,
        MODERN,
        RMS
        | BIASES
        | latent_keys(512, 1536, 128, 64, 128)
        | _without(deepseek_keys(64, None, False, 1407), "n_group", "topk_group", "norm_topk_prob"),
        {"mlp_bias": False},
        read=_deepseek_2,
        write=_written_deepseek_2,
        harmless=WIDTHS_OF_HEADS | FURTHER | {"norm_topk_prob", "n_group", "topk_group"},
        **OWN,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        MIXED,
        MODERN,
        RMS | BIASES | latent_keys(512, 1536, 128, 64, 128) | deepseek_keys(256, 8, True, 2048) | group_keys(8, 4, 2.5),
        NEIGHBOURS_ONLY,
        read=lambda config, keys: deepseek_experts(config, 256, 1, 3, 2048),
        write=written_deepseek_experts,
        harmless=WIDTHS_OF_HEADS | FURTHER,
        later_layers=True,
        **OWN,
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        MIXED,
        MODERN,
        RMS_5 | BIASES | latent_keys(512, 768, 192, 64, 256) | deepseek_keys(64, 4, True, 1536) | group_keys(1, 1, 1.8),
        NEIGHBOURS_ONLY,
        in_older=False,
        read=_glm4_moe_lite,
        write=_written_glm4_moe_lite,
        harmless=WIDTHS_OF_HEADS | FURTHER,
        later_layers=True,
        **OWN,
    ),
    "youtu": Family(
        "YoutuForCausalLM",
        with_latents(rows_of(like_llama(PRE))),
        MODERN,
        RMS | BIASES | latent_keys(512, 1536, 128, 64, 128),
        NEIGHBOURS_ONLY,
        tied=True,
        in_older=False,
        harmless=WIDTHS_OF_HEADS | {"embedding_initializer_range"},
        **OWN,
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        with_latents(rows_of(like_llama(PRE)), neighbours=False),
        MODERN,
        RMS_5
        | BIASES
        | MLP_BIAS
        | _without(latent_keys(256, 768, 64, 32, 0), "v_head_dim")
        | {"scale_emb": ("embedding_scale", 12.0)},
        tied=True,
        in_older=False,
        read=_minicpm3,
        write=_written_minicpm3,
        harmless=WIDTHS_OF_HEADS,
        **OWN,
    ),
}
"""`model_type` -> family."""
