"""Parts of a model's heads: attention over all of them, done in parts, gives the same values and gradients."""

import copy
import json
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca.attention.context import WHOLE, HeadShard, assign_shard
from megatron_coca.attention.layer import SelfAttention
from megatron_coca.attention.positions.bias import (
    AlibiBias,
    LearnedBuckets,
    LearnedKerpleLog,
    LearnedKerplePower,
    alibi_slopes,
)
from megatron_coca.checkpoints.native.state import layer_shards
from megatron_coca.config import load_config
from megatron_coca.model import GPT, build_model

SHAPE = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 12, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "rotary": {"pos_emb": "rotary"},
    "coca": {"pos_emb": "coca"},
    "alibi": {"pos_emb": "alibi"},
    "a bias by layer": {"pos_emb": "kerple_log"},
    "a shared bias": {"pos_emb": "rpe"},
    "grouped queries": {"pos_emb": "coca", "num_kv_heads": 2},
    "grouped queries, a bias by layer": {"pos_emb": "kerple_power", "num_kv_heads": 2},
    "sandwich": {"pos_emb": "sandwich"},
    "fire": {"pos_emb": "fire"},
    "sinks, factors, norms": {"pos_emb": "coca", "sink_logits": True, "logit_scaling": "ssmax", "qk_norm": "head"},
    "gates of heads": {"pos_emb": "coca", "num_kv_heads": 2, "attention_output_gate": "head"},
    "gates of features": {"pos_emb": "rotary", "attention_output_gate": "feature"},
}
MODELS["values from keys"] = {"pos_emb": "rotary", "values_from_keys": True, "value_norm": True}
BY_TYPE: dict[str, Any] = {
    "num_layers": 2,
    "attention_config": ["local", "global"],
    "layer_types": {"local": {}},
    "head_shapes": {"local": {"kv_channels": 6, "num_kv_heads": 2, "values_from_keys": True}},
}
DISTANCES = torch.arange(5.0)


def model_of(keys: dict[str, Any]) -> GPT:
    config = load_config([], [f"{name}={json.dumps(value)}" for name, value in (SHAPE | keys).items()])
    model = build_model(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return model


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    "bias",
    [
        AlibiBias(alibi_slopes(4)),
        LearnedKerpleLog(4).distance_bias(),
        LearnedKerplePower(4).distance_bias(),
        LearnedBuckets(4, 8).distance_bias(),
    ],
    ids=lambda bias: bias.formula,
)
def test_the_parts_of_a_bias_make_it_up(bias: Any, count: int) -> None:
    parts = [HeadShard(index, count).bias(bias) for index in range(count)]
    assert all(part.formula == bias.formula and len(part.coefficients) == 4 // count for part in parts)
    assert torch.equal(torch.cat([part.at(DISTANCES) for part in parts]), bias.at(DISTANCES))


def test_no_bias_has_no_parts() -> None:
    assert HeadShard(1, 2).bias(None) is None


def part_of(model: GPT, keys: dict[str, Any], index: int, count: int) -> GPT:
    """The model with the rows and columns of one part of the heads in its attention, as tensor parallelism cuts it."""
    config = load_config([], [f"{name}={json.dumps(value)}" for name, value in (SHAPE | keys).items()])
    part = copy.deepcopy(model)
    attention = part.blocks[0].attention
    for cut in layer_shards(config.model)[: 3 if config.model.output_gates else 2]:
        layer = getattr(attention, cut.layer.removeprefix("attention."))
        for name, parameter in list(layer.named_parameters()):
            if cut.holds(f"blocks.0.{cut.layer}.{name}"):
                setattr(layer, name, nn.Parameter(cut.shard(index, count).cut(parameter.detach())))
            elif index:
                parameter.data.zero_()  # the bias of a sum is added once
    assign_shard(part, HeadShard(index, count))
    return part


def attended(model: GPT, x: Tensor) -> Tensor:
    """The attention layer's output for hidden states x [batch, length, hidden_size]."""
    frame = model.positions(torch.arange(x.shape[1]), x.shape[1], x.dtype)
    return model.blocks[0].attention(x, frame)


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_the_parts_of_attention_add_up(keys: dict[str, Any]) -> None:
    """With the gradients of the input and of the heads' parameters: each part gives its heads' share of them."""
    model, x = model_of(keys), torch.randn(2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = [part_of(model, keys, index, 2) for index in range(2)]
    whole_input, part_input = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = attended(model, whole_input), sum(attended(part, part_input) for part in parts)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for output in (expected, found):
        output.square().sum().backward()
    torch.testing.assert_close(part_input.grad, whole_input.grad, rtol=1e-9, atol=1e-9)
    learned = [name for name, _ in model.named_parameters() if "position" in name]
    assert bool(learned) == ("sink_logits" in keys or keys["pos_emb"] in ("kerple_log", "kerple_power", "rpe", "fire"))
    for name in learned:
        total = sum(part.get_parameter(name).grad for part in parts)
        rounding = 1e-6 if keys["pos_emb"] == "fire" else 1e-9  # its network works in float32
        torch.testing.assert_close(total, model.get_parameter(name).grad, rtol=rounding, atol=rounding)


def test_every_part_of_a_model_takes_its_share() -> None:
    model, share = model_of({"pos_emb": "rpe"}), HeadShard(1, 2)
    shared = [part for part in model.modules() if hasattr(part, "share")]
    assert {type(part).__name__ for part in shared} == {"GPT", "PositionEncoding", "SelfAttention"}
    assert all(part.share is WHOLE for part in shared)
    assign_shard(model, share)
    assert all(part.share is share for part in shared)


UNCUT = r"embedding|norm|final_linear"


@pytest.mark.parametrize("keys", [{}, {"num_kv_heads": 2}, BY_TYPE, {"activation": "swiglu", "intermediate_size": 48}])
@pytest.mark.parametrize("count", [1, 2])
def test_cuts_cover_the_matrices_of_a_block(keys: dict[str, Any], count: int) -> None:
    keys = SHAPE | keys | {"forgetting_gate": "fox", "attention_output_gate": "feature"}
    config = load_config([], [f"{name}={json.dumps(value)}" for name, value in keys.items()])
    model = build_model(config)
    names = [name for name, _ in model.named_parameters() if name.endswith("weight") and not re.search(UNCUT, name)]
    for name in names:
        (cut,) = (cut for cut in layer_shards(config.model) if cut.holds(name))
        weight = model.get_parameter(name).detach()
        assert sum(cut.blocks) == weight.shape[cut.dim]
        whole = torch.full_like(weight, torch.nan)
        for index in range(count):
            cut.shard(index, count).copy_into(cut.shard(index, count).cut(weight), whole)
        assert torch.equal(whole, weight)


def test_only_rows_take_their_bias_along() -> None:
    rows, columns = layer_shards(load_config([], [f"{name}={value}" for name, value in SHAPE.items()]).model)[:2]
    assert rows.holds("blocks.0.attention.query_key_value.bias") and columns.holds("blocks.0.attention.dense.weight")
    assert not columns.holds("blocks.0.attention.dense.bias")


def test_attention_counts_heads_by_its_projection() -> None:
    model = model_of({"num_kv_heads": 2})
    attention = model.blocks[0].attention
    assert isinstance(attention, SelfAttention)
    q, k, v = attention._heads(torch.zeros(1, 3, (2 + 1 + 1) * 8))
    assert q.shape == (1, 2, 3, 8) and k.shape == v.shape == (1, 1, 3, 8)
