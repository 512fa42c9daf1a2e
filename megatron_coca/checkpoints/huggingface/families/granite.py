"""Families of IBM's Granite and of HyperCLOVA X, which has the same scales as Granite.

Each family is a row of `FAMILIES` (see `keys.Family`).
"""

from collections.abc import Callable
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
    ROUTER_LOSS,
    counted_experts,
    experts_only,
)
from megatron_coca.checkpoints.huggingface.families.parts.keys import FIRST_WITHOUT, WITH_BASE, Family
from megatron_coca.checkpoints.huggingface.unsupported_types import EXPERTS, RECURRENT
from megatron_coca.checkpoints.huggingface.weight_map import (
    GATE_FIRST,
    PRE,
    SINGLE,
    Row,
    WeightPacking,
    layer_rows,
    like_llama,
)
from megatron_coca.config import Config, ModelConfig

GRANITE_SWA = (
    *like_llama(PRE),
    Row("blocks.{i}.attention.position_sinks.weight", ("model.layers.{i}.self_attn.sinks",)),
)

_GRANITE_HYBRID = {
    "mlp.linear1": ("shared_mlp.input_linear", GATE_FIRST),
    "mlp.linear2": ("shared_mlp.output_linear", SINGLE),
}

GRANITE_HYBRID = (
    *(row for row in like_llama(PRE) if ".mlp." not in row.ours),
    *layer_rows("model.layers.{i}", _GRANITE_HYBRID),
)


def _gates_last(packed: Tensor) -> Tensor:
    return torch.cat(packed.chunk(2, dim=1)[::-1], dim=1)


GATES_FIRST = WeightPacking(
    lambda parts, heads: _gates_last(parts[0]), lambda packed, heads, count: [_gates_last(packed)]
)
"""All experts in one tensor [experts, 2 * width, hidden_size], in which each gate precedes the up projection."""


def _with_mixtures(
    experts: tuple[str, str], router: str, sinks: tuple[Row, ...] = ()
) -> Callable[[ModelConfig], tuple[Row, ...]]:
    """Return the table of a family with experts in all layers. The arguments are names within `block_sparse_moe`."""

    def rows(model: ModelConfig) -> tuple[Row, ...]:
        mixture, shared = "model.layers.{i}.block_sparse_moe", model.moe_shared_intermediate_size is not None
        beside = {ours.replace("mlp.", "mlp.shared."): theirs for ours, theirs in _GRANITE_HYBRID.items() if shared}
        return (
            *(row for row in like_llama(PRE) if ".mlp." not in row.ours),
            *sinks,
            Row("blocks.{i}.mlp.linear1.weight", (f"{mixture}.{experts[0]}",), GATES_FIRST),
            Row("blocks.{i}.mlp.linear2.weight", (f"{mixture}.{experts[1]}",)),
            Row("blocks.{i}.mlp.router.weight", (f"{mixture}.{router}",)),
            *layer_rows("model.layers.{i}", beside),
        )

    return rows


GRANITE_MOE = _with_mixtures(("input_linear.weight", "output_linear.weight"), "router.layer.weight")
GRANITE_MOE_SWA = _with_mixtures(("experts.gate_up_proj", "experts.down_proj"), "router.weight", GRANITE_SWA[-1:])

ATTENTION = ("attention", "full_attention")
"""Names of layers with attention in the config.json of Granite 4."""


def inverse(value: float) -> float:
    """Return 1 / value. If the result is within the rounding error of a number with few digits, return that number.

    A factor that an import inverts is then the same after an export, which inverts it again.
    """
    result = 1.0 / value
    return float(f"{result:.12g}") if abs(float(f"{result:.12g}") * value - 1.0) < 1e-15 else result


def _granite(config: Json, keys: Json) -> dict[str, Any]:
    return {"final_logit_scale": inverse(float(config.get("logits_scaling", 1.0)))}


def _to_granite(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        "logits_scaling": inverse(model.final_logit_scale),
        "attention_multiplier": model.softmax_scale or model.head_dim**-0.5,
    }


MULTIPLIERS = {
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
}

GRANITE = MULTIPLIERS | {"attention_multiplier": ("softmax_scale", 1.0)}
GRANITE_EXPERTS = {"num_local_experts": ("moe_num_experts", 8), "num_experts_per_tok": ("moe_top_k", 2)}


_counted = counted_experts("num_local_experts", 8, {"moe_norm_topk_prob": True})


def _granite_moe(config: Json, keys: Json) -> dict[str, Any]:
    return _counted(config, keys) | _granite(config, keys)


def _to_granite_moe(config: Config) -> dict[str, Any]:
    return _to_granite(config) | experts_only(config)


def _granite_moe_shared(config: Json, keys: Json) -> dict[str, Any]:
    shared = config.get("shared_intermediate_size") or None
    return _granite_moe(config, keys) | {"moe_shared_intermediate_size": shared}


def _to_granite_moe_shared(config: Config) -> dict[str, Any]:
    return _to_granite_moe(config) | {"shared_intermediate_size": config.model.moe_shared_intermediate_size or 0}


def _granite_swa(config: Json, keys: Json) -> dict[str, Any]:
    bases = {base for base in config.get("layer_rope_theta") or () if base}
    if len(bases) > 1:
        raise NotSupported("layer_rope_theta: several bases are not supported")
    return _granite(config, keys) | ({"rotary_emb_base": float(*bases)} if bases else {})


def _to_granite_swa(config: Config) -> dict[str, Any]:
    kinds, base = config.layer_types, config.position.rotary_emb_base
    bases = [base if kinds[name].embedding.rotary else 0 for name in config.model.layer_names]
    return _to_granite(config) | {"layer_rope_theta": bases}


def _granite_moe_swa(config: Json, keys: Json) -> dict[str, Any]:
    return _granite_moe_shared(config, keys) | _granite_swa(config, keys)


def _to_granite_moe_swa(config: Config) -> dict[str, Any]:
    return _to_granite_moe_shared(config) | _to_granite_swa(config)


def _hyperclovax_rows(model: ModelConfig) -> tuple[Row, ...]:
    after = {"attention_output_layernorm": "post_norm1", "mlp_output_layernorm": "post_norm2"}
    return like_llama(PRE | after if model.norm_position == "sandwich" else PRE)


def _hyperclovax(config: Json, keys: Json) -> dict[str, Any]:
    return {"norm_position": "sandwich" if config.get("use_post_norm", True) else "pre"}


def _to_hyperclovax(config: Config) -> dict[str, Any]:
    return {"use_post_norm": config.model.norm_position == "sandwich"}


def _granite_hybrid(config: Json, keys: Json) -> dict[str, Any]:
    """Read a Granite 4 model with neither Mamba layers nor experts. Both are optional in its class."""
    experts = config.get("num_local_experts", 8)
    if experts:
        raise NotSupported(f"num_local_experts: {experts} is not supported, only 0: {EXPERTS}")
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if others := sorted(set(kinds) - {*ATTENTION}):
        raise NotSupported(f"layer_types: {others[0]!r} is not supported, only {ATTENTION[0]}: {RECURRENT}")
    rotates = config.get("position_embedding_type") == "rope"
    return _granite(config, keys) | ({} if rotates else {"pos_emb": "none", "rope_scaling": None})


def _to_granite_hybrid(config: Config) -> dict[str, Any]:
    return _to_granite(config) | {
        "layer_types": [ATTENTION[0]] * config.model.num_layers,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope" if config.position.embedding.rotary else None,
        "mamba_n_heads": 1,  # the class checks that this number divides hidden_size, even if no layer reads it
    }


FAMILIES: dict[str, Family] = {
    "granite": Family(
        "GraniteForCausalLM",
        rows_of(like_llama(PRE)),
        MODERN,
        RMS | BIASES | MLP_BIAS | GRANITE,
        read=_granite,
        write=_to_granite,
    ),
    "granite_swa": Family(
        "GraniteSWAForCausalLM",
        rows_of(GRANITE_SWA),
        MODERN | {"sink_logits": True},
        RMS_5 | BIASES | MLP_BIAS | GRANITE,
        tied=True,
        windows=FIRST_WITHOUT,
        window=128,
        rotating=WITH_BASE,
        read=_granite_swa,
        write=_to_granite_swa,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        GRANITE_MOE,
        MODERN,
        RMS | BIASES | GRANITE | GRANITE_EXPERTS,
        read=_granite_moe,
        write=_to_granite_moe,
        harmless=ROUTER_LOSS,
    ),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM",
        GRANITE_MOE,
        MODERN,
        RMS | BIASES | GRANITE | GRANITE_EXPERTS,
        read=_granite_moe_shared,
        write=_to_granite_moe_shared,
        harmless=ROUTER_LOSS,
    ),
    "granitemoe_swa": Family(
        "GraniteMoeSWAForCausalLM",
        GRANITE_MOE_SWA,
        MODERN | {"sink_logits": True},
        RMS | BIASES | GRANITE | GRANITE_EXPERTS,
        windows=FIRST_WITHOUT,
        window=128,
        rotating=WITH_BASE,
        in_older=False,
        read=_granite_moe_swa,
        write=_to_granite_moe_swa,
        harmless=ROUTER_LOSS,
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM",
        rows_of(GRANITE_HYBRID),
        MODERN,
        RMS | BIASES | GRANITE,
        names={"intermediate_size": "shared_intermediate_size"},
        read=_granite_hybrid,
        write=_to_granite_hybrid,
        harmless=frozenset(
            {
                *("intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
                *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand"),
                *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "layers_block_type"),
            }
        ),
    ),
    "hyperclovax": Family(
        "HyperCLOVAXForCausalLM",
        _hyperclovax_rows,
        MODERN,
        RMS
        | BIASES
        | MLP_BIAS
        | MULTIPLIERS
        | {"attention_multiplier": ("softmax_scale", None), "logits_scaling": ("final_logit_scale", 1.0)},
        read=_hyperclovax,
        write=_to_hyperclovax,
    ),
}
"""`model_type` -> family."""
