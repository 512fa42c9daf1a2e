"""Our attention in a network of one's own, and the scores and weights of any network with it."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from megatron_coca import Attention, attention_maps, build_model, load_config
from megatron_coca.attention.inputs import AttentionInputs
from megatron_coca.config import ConfigError
from megatron_coca.evaluation.attention_maps import observed

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "seq_length": 16}
CASES: dict[str, dict[str, Any]] = {
    "coca": {"pos_emb": "coca", "num_kv_heads": 4},
    "dynamic": {"pos_emb": "rotary", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "rerope": {"pos_emb": "rotary", "relative_positions": {"type": "rerope", "window": 4}},
    "streaming": {"pos_emb": "rotary", "relative_positions": {"type": "streaming", "window": 4}},
    "dual chunk": {"pos_emb": "coca", "relative_positions": {"type": "dual_chunk", "chunk_size": 6}},
    "rpe": {"pos_emb": "rpe"},
    "alibi capped": {"pos_emb": "alibi", "attn_logit_softcapping": 0.1},
    "sinks": {"pos_emb": "rotary", "sink_logits": True},
    "factors": {"pos_emb": "rotary", "logit_scaling": "ssmax"},
    "chunks": {"pos_emb": "rotary", "attention_chunk_size": 8},
    "gates": {"pos_emb": "coca", "forgetting_gate": "fox"},
    "gates, string": {
        "pos_emb": "rotary",
        "forgetting_gate": "cable",
        "relative_positions": {"type": "string", "window": 6, "local": 2},
    },
    "output gate": {"pos_emb": "coca", "attention_output_gate": "feature"},
    "fire, norms": {"pos_emb": "fire", "qk_norm": "head"},
}


@pytest.fixture(params=CASES, ids=str)
def keys(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPE | {"vocab_size": 64} | CASES[request.param]


def hidden(length: int = 40) -> Tensor:
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def documents(length: int = 40) -> Tensor:
    return torch.tensor([[0] * 13 + [1] * (length - 13), [0] * length])


def shaken(module: nn.Module) -> Any:
    """In float64, with parameters away from their initial values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            )
    return module.double().eval()


@torch.no_grad()
@pytest.mark.parametrize("packed", [None, documents()], ids=["one text", "documents"])
def test_it_is_the_attention_of_a_model(keys: dict[str, Any], packed: Tensor | None) -> None:
    config = load_config(keys)
    model, own = shaken(build_model(config)), shaken(Attention(config))
    own.attention.load_state_dict(model.blocks[0].attention.state_dict())
    own.encoding.load_state_dict(model.positions.state_dict())
    seen: list[Tensor] = []
    model.blocks[0].attention.register_forward_hook(lambda module, given, output: seen.extend((given[0], output)))
    model(torch.randint(64, (2, 40)), documents=packed)
    assert torch.equal(own(seen[0], documents=packed), seen[1])


@torch.no_grad()
@pytest.mark.parametrize("packed", [None, documents()], ids=["one text", "documents"])
def test_maps_are_those_of_the_output(keys: dict[str, Any], packed: Tensor | None) -> None:
    layer = shaken(Attention(load_config(keys)))
    kept: list[AttentionInputs] = []
    with observed(layer, lambda q, k, inputs: kept.append(inputs)):
        output = layer(hidden(), documents=packed)
    ((scores, weights),) = attention_maps(layer, hidden(), documents=packed)
    values = kept[0].value.repeat_interleave(4 // kept[0].value.shape[1], dim=1)
    attended = (weights @ values).transpose(1, 2)
    if layer.attention.output_gate is not None:
        attended = attended * layer.attention.output_gate(hidden()).sigmoid().unflatten(-1, (4, -1))
    torch.testing.assert_close(layer.attention.dense(attended.flatten(2)), output)
    assert scores.shape == weights.shape == (2, 4, 40, 40)
    assert torch.equal(scores.isinf(), weights == 0) and not weights.triu(1).any()
    if not keys.get("sink_logits"):
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 40, dtype=torch.float64))
    if packed is not None:
        assert not weights[0, :, 13:, :13].any() and weights[1, :, 13:, :13].any()


def test_it_trains_and_no_two_layers_begin_alike() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(*(Attention(load_config(SHAPE | {"pos_emb": "rpe"})) for _ in range(2)), nn.Linear(32, 1))
    first, second = (layer.attention.query_key_value.weight for layer in list(network)[:2])
    assert not torch.equal(first, second) and abs(float(first.detach().std()) - 0.02) < 0.002, "init_method_std"
    network(hidden(8).float()).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in network.parameters())
    assert len(attention_maps(network, hidden(8).float())) == 2


def test_layers_that_differ() -> None:
    types = {"attention_config": [[["near", "global"], 1]], "layer_types": {"near": {"sliding_window_width": 3}}}
    config = load_config(SHAPE | {"pos_emb": "rotary"} | types)
    near, everywhere = (attention_maps(Attention(config, layer), hidden(9).float())[0].weights for layer in (0, 1))
    assert int((near[0, 0, 8] > 0).sum()) == 4 and int((everywhere[0, 0, 8] > 0).sum()) == 9


def test_positions_of_the_embedding_are_not_supported() -> None:
    with pytest.raises(ConfigError, match="pos_emb: learned positions are added"):
        Attention(load_config(SHAPE | {"pos_emb": "learned"}))
