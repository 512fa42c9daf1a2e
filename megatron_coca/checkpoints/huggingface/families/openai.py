"""The family of gpt-oss. It is a row of `FAMILIES` (see `keys.Family`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_coca.checkpoints.huggingface.families.parts.defaults import MODERN, RMS_5, Json, NotSupported
from megatron_coca.checkpoints.huggingface.families.parts.experts import ROUTER_LOSS, at_least_two, experts_only
from megatron_coca.checkpoints.huggingface.families.parts.keys import FIRST_OF_TWO, Family
from megatron_coca.checkpoints.huggingface.weight_map import PRE, SINGLE, Heads, Row, WeightPacking, like_llama
from megatron_coca.config import ModelConfig


def _rows_last(packed: Tensor) -> Tensor:
    return packed.mT.contiguous() if packed.dim() == 3 else packed


def _join_pairs(parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Reorder columns in which gate and value alternate: first all columns of the value, then all of the gate."""
    packed = parts[0]
    return _rows_last(torch.cat((packed[..., 1::2], packed[..., ::2]), dim=-1))


def _split_pairs(packed: Tensor, heads: Heads, count: int) -> list[Tensor]:
    value, gate = _rows_last(packed).chunk(2, dim=-1)
    return [torch.stack((gate, value), dim=-1).flatten(-2)]


PAIRS = WeightPacking(_join_pairs, _split_pairs)
"""All experts in one tensor [experts, in, out], or their biases [experts, out]. Gate and value alternate."""
COLUMNS = WeightPacking(lambda parts, heads: _rows_last(parts[0]), lambda packed, heads, count: [_rows_last(packed)])
"""All experts in one tensor [experts, in, out], or their biases [experts, out]."""

_MLP = "model.layers.{i}.mlp"
GPT_OSS = (
    *(row for row in like_llama(PRE) if ".mlp." not in row.ours),
    Row("blocks.{i}.attention.position_sinks.weight", ("model.layers.{i}.self_attn.sinks",)),
    *(Row(f"blocks.{{i}}.mlp.router.{kind}", (f"{_MLP}.router.{kind}",), SINGLE) for kind in ("weight", "bias")),
    Row("blocks.{i}.mlp.linear1.weight", (f"{_MLP}.experts.gate_up_proj",), PAIRS),
    Row("blocks.{i}.mlp.linear1.bias", (f"{_MLP}.experts.gate_up_proj_bias",), PAIRS),
    Row("blocks.{i}.mlp.linear2.weight", (f"{_MLP}.experts.down_proj",), COLUMNS),
    Row("blocks.{i}.mlp.linear2.bias", (f"{_MLP}.experts.down_proj_bias",), COLUMNS),
)


def _rows(model: ModelConfig) -> tuple[Row, ...]:
    return GPT_OSS


def _gpt_oss(config: Json, keys: Json) -> dict[str, Any]:
    at_least_two(config, "num_local_experts", 128)
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        raise NotSupported("rope_parameters: missing, so the class uses an extension of its own; add the section")
    return {"activation": "clamped_swiglu"}


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _rows,
        MODERN | {"use_bias_in_mlp": True, "moe_router_bias": True, "moe_norm_topk_prob": True, "sink_logits": True},
        RMS_5
        | {"num_local_experts": ("moe_num_experts", 128), "num_experts_per_tok": ("moe_top_k", 4)}
        | {"attention_bias": ("use_bias_in_attn_linear", True)}
        | {"swiglu_limit": ("swiglu_limit", 7.0), "swiglu_alpha": ("swiglu_alpha", 1.702)},
        head_dim=64,
        rope=150000.0,
        windows=FIRST_OF_TWO,
        window=128,
        read=_gpt_oss,
        write=experts_only,
        harmless=ROUTER_LOSS | {"experts_per_token", "initial_context_length"},
    ),
}
"""`model_type` -> family."""
