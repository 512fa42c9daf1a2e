"""The parameters that decay, and the configured numbers in the optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_coca.config import Config, load_config
from megatron_coca.model import build_model
from megatron_coca.training.optimizer import OPTIMIZERS, build_optimizer, parameter_groups

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "pos_emb": "learned",
}


def configured(**keys: Any) -> Config:
    return load_config([], SHAPE | {"optimizer.params.lr": 0.01} | keys)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(configured(no_weight_tying=True))
    decayed, kept = parameter_groups(model, 0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rsplit(".", 1)[1] for p in decayed["params"]} == {"weight"}
    assert {"norm.weight", "norm.bias", "blocks.0.mlp.linear1.bias"} <= {names[id(p)] for p in kept["params"]}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    assert {id(p) for p in decayed["params"]}.isdisjoint(id(p) for p in kept["params"])


def test_constant_angles_do_not_decay() -> None:
    """They are a matrix, by head and magnitude. Drawn angles are not trained at all."""
    model = build_model(configured(pos_emb="pope"))
    (_, kept), offsets = parameter_groups(model, 0.3), model.blocks[0].attention.position_offsets
    assert any(parameter is offsets.bias for parameter in kept["params"])
    model = build_model(configured(pos_emb="coca_strict", pos_emb_options={"initial_angle": "random"}))
    drawn = model.blocks[0].attention.position_offsets.bias
    assert not any(parameter is drawn for group in parameter_groups(model, 0.3) for parameter in group["params"])


def test_a_tied_head_is_trained_once_and_frozen_parameters_never() -> None:
    model = build_model(configured())
    model.embedding.requires_grad_(False)
    listed = [parameter for group in parameter_groups(model, 0.1) for parameter in group["params"]]
    assert len(listed) == len({id(parameter) for parameter in listed})
    assert not any(parameter is model.embedding.word_embeddings.weight for parameter in listed)
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1, "no empty group"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_of_the_configuration_arrive(name: str) -> None:
    keys = {"optimizer.type": name, "optimizer.params.betas": [0.8, 0.9], "optimizer.params.eps": 1e-6}
    config = configured(weight_decay=0.2, **({"optimizer.type": name} if name == "sgd" else keys))
    optimizer = build_optimizer(build_model(config), config.optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    if name != "sgd":
        assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)
        assert name == "lion" or all(group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_weight_decay_is_decoupled() -> None:
    config = configured(weight_decay=0.5)
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = build_optimizer(layer, config.optimizer)
    layer.weight.grad, layer.bias.grad = torch.zeros(3, 3), torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), before[0] * (1 - 0.01 * 0.5))
    assert torch.equal(layer.bias.detach(), before[1])


def test_lion_takes_the_steps_of_its_formula() -> None:
    """As GPT-NeoX's: decay, then the sign of a mean with beta1, and then the momentum with beta2."""
    config = configured(**{"optimizer.type": "Lion"}, weight_decay=0.5)
    assert config.optimizer.betas == (0.9, 0.99)
    assert configured(**{"optimizer.type": "lion", "optimizer.params.betas": [0.8, 0.9]}).optimizer.betas == (0.8, 0.9)
    layer = nn.Linear(4, 3, bias=False)
    optimizer = build_optimizer(layer, config.optimizer)
    generator = torch.Generator().manual_seed(0)
    weight, momentum = layer.weight.detach().double(), torch.zeros(3, 4, dtype=torch.float64)
    for _ in range(4):
        layer.weight.grad = torch.randn(3, 4, generator=generator)
        grad = layer.weight.grad.double()
        optimizer.step()
        weight = weight * (1 - 0.01 * 0.5) - 0.01 * torch.sign(0.9 * momentum + 0.1 * grad)
        momentum = 0.99 * momentum + 0.01 * grad
        torch.testing.assert_close(layer.weight.detach().double(), weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"].double(), momentum, rtol=0, atol=1e-7)
