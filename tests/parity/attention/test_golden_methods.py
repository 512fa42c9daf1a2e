"""Methods against numbers computed with their authors' code (tests/golden/authors/README.md)."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_coca import Attention, load_config
from megatron_coca.attention.build import BACKENDS, build_method
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.attention.layer import PARTS, packed_rows
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.attention.positions.bias import FIRE_THRESHOLD, LearnedFire
from megatron_coca.attention.positions.frequencies import Rotary, Scaling

RECORDED = load_file(Path(__file__).parents[2] / "golden" / "authors" / "methods.safetensors")
SHAPE = {"num_layers": 1, "vocab_size": 8}


def recorded(name: str) -> dict[str, Tensor]:
    return {key.partition(".")[2]: value for key, value in RECORDED.items() if key.startswith(f"{name}.")}


def inputs_of(found: dict[str, Tensor], **keys: Any) -> AttentionInputs:
    """Of recorded q, k and v [batch, heads, length, head_dim], of which q may be the last ones."""
    _, heads, length, width = found["k"].shape
    config = load_config([], SHAPE | {"hidden_size": heads * width, "num_attention_heads": heads} | keys)
    method, past = build_method(config.position, config.model), length - found["q"].shape[2]
    every = torch.arange(length)
    context = PositionEncoding(method).eval()(every[past:], length, torch.float32, every)
    return method.prepare(found["q"], found["k"], found["v"], context)


@pytest.mark.parametrize("backend", ["merge", "reference"])
def test_dual_chunk_attention(backend: str) -> None:
    """ChunkLlama's decoding with pretraining_length 32 and local_window_size 4; 70 tokens are four chunks."""
    found = recorded("dual_chunk")
    chunks = {"type": "dual_chunk", "chunk_size": 20, "max_position": 24}
    inputs = inputs_of(found, seq_length=32, pos_emb="rotary", relative_positions=chunks)
    torch.testing.assert_close(BACKENDS[backend].attend(inputs), found["out"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["merge", "reference"])
def test_string(backend: str) -> None:
    """Its decoding, which counts a distance of S once; in one pass its code counts it twice. Its code also multiplies
    cos and sin by 0.1 ln 2 + 1, which is YaRN's option without YaRN's frequencies.
    """
    found = recorded("string")
    keys = {"relative_positions": {"type": "string", "window": 12, "local": 5}, "seq_length": 36, "pos_emb": "rotary"}
    factor = {"rope_type": "yarn", "factor": 1.0, "attention_factor": 0.1 * math.log(2) + 1}
    out = BACKENDS[backend].attend(inputs_of(found, rope_scaling=factor, **keys))
    torch.testing.assert_close(out, found["out"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["sdpa", "merge", "reference"])
@pytest.mark.parametrize("name", ["pope", "pope_partial"])
def test_pope(name: str, backend: str) -> None:
    """PoPE-pytorch adds delta to the key's angle, which gives the same scores as subtracting it from the query's."""
    found = recorded(name)
    _, heads, length, width = found["k"].shape
    keys = {"hidden_size": heads * width, "num_attention_heads": heads, "seq_length": 64, "pos_emb": "pope"}
    config = load_config([], SHAPE | keys | {"rotary_pct": found["offset"].shape[1] / width})
    method = build_method(config.position, config.model)
    context = PositionEncoding(method).eval()(torch.arange(length), length, torch.float32)
    inputs = method.prepare(found["q"], found["k"], found["v"], context, offset=found["offset"])
    torch.testing.assert_close(BACKENDS[backend].attend(inputs), found["out"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["sdpa", "merge", "reference"])
def test_forgetting_transformer(backend: str) -> None:
    """The reference of its own test, for the last 45 of 60 tokens."""
    found = recorded("fox")
    inputs = inputs_of(found, seq_length=64, pos_emb="none", softmax_scale=0.5)
    out = BACKENDS[backend].attend(inputs.replace(gates=found["gates"]))
    torch.testing.assert_close(out, found["out"], rtol=0, atol=2e-5)


@torch.no_grad()
def test_cable() -> None:
    """A whole layer of its code, which does not divide scores by sqrt(head_dim)."""
    found = recorded("cable")
    keys = {"hidden_size": 32, "num_attention_heads": 4, "pos_emb": "none", "softmax_scale": 1.0, "seq_length": 30}
    layer = Attention(load_config([], SHAPE | keys | {"forgetting_gate": "cable"})).eval()
    weights = {
        "position_gates.projection.weight": found["h_attn.weight"],
        "position_gates.projection.bias": found["h_attn.bias"],
        "dense.weight": found["c_proj.weight"],
        "dense.bias": found["c_proj.bias"],
    }
    for kind in ("weight", "bias"):
        packed = torch.empty_like(found[f"c_attn.{kind}"])
        for part, rows in zip(PARTS, found[f"c_attn.{kind}"].chunk(3), strict=True):
            packed[packed_rows(32, 32, 8)[part].numbers()] = rows
        weights[f"query_key_value.{kind}"] = packed
    layer.attention.load_state_dict(weights)
    torch.testing.assert_close(layer(found["x"]), found["out"], rtol=0, atol=2e-5)


@torch.no_grad()
def test_fire() -> None:
    """Up to a constant of each head, its output bias, which softmax cancels; its denominator has 1e-6 added."""
    found, bias = recorded("fire"), LearnedFire(4)
    bias.hidden_weight.copy_(found["0.weight"][:, 0])
    bias.hidden_bias.copy_(found["0.bias"])
    bias.output_weight.copy_(found["2.weight"])
    bias.c.copy_(found["c"])
    bias.a.copy_(found["multiplier"] * found["length"] / FIRE_THRESHOLD)
    token = torch.arange(40)
    distance = token[:, None] - token
    ours = bias.distance_bias().at(distance.clamp(min=0).float(), token[:, None])
    theirs = found["bias"] - found["2.bias"][:, None, None]
    torch.testing.assert_close(ours[:, distance >= 0], theirs[:, distance >= 0], rtol=0, atol=2e-5)
    assert found["length"] < 20, "both sides of the threshold are in it"


@pytest.mark.parametrize(
    ("name", "length", "options"),
    [
        ("plain", 2048, {"rope_type": "default"}),
        ("ntk", 2048, {"rope_type": "ntk", "factor": 4.0}),
        ("yarn", 512, {"rope_type": "yarn", "factor": 8.0}),
    ],
)
def test_resonance(name: str, length: int, options: dict[str, Any]) -> None:
    ours = Rotary(32, original_length=length, scaling=Scaling(resonance=True, **options)).inverse_frequencies(length)
    torch.testing.assert_close(ours.float(), recorded("resonance")[name], rtol=1e-6, atol=0)
