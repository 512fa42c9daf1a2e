"""The parameters that decay, and the configured numbers in the optimizer."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import build_model
from megatron_coca.training.optimizer import (
    OPTIMIZERS,
    Muon,
    build_optimizer,
    orthogonalized,
    parameter_groups,
    train_only_parts,
)

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
    keys |= {"engine": "native"} if name == "Muon" else {}
    config = configured(weight_decay=0.2, **({"optimizer.type": name} if name == "sgd" else keys))
    optimizer = build_optimizer(build_model(config), config.optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2] * (name == "Muon") + [0.2, 0.0]
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


def test_muon_takes_the_steps_of_pytorch() -> None:
    """For wide, tall and square matrices; each of a stack of matrices is one; vectors take those of AdamW."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw) for shape in ((12, 40), (40, 12), (16, 16), (3, 8, 20), (7,))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    stacked = [nn.Parameter(each.clone()) for each in values[3]]
    groups = [{"params": ours[:4], "weight_decay": 0.3, "orthogonal": True}, {"params": ours[4:], "weight_decay": 0.1}]
    muon = Muon(groups, 1e-2, 0.9, (0.8, 0.9), 1e-6)
    same = {"lr": 1e-2, "weight_decay": 0.3, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    references = [
        torch.optim.Muon([*theirs[:3], *stacked], **same),
        torch.optim.AdamW(theirs[4:], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6),
    ]
    for _ in range(4):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=draw)
            other.grad = one.grad.clone()
        for each, grad in zip(stacked, ours[3].grad, strict=True):  # type: ignore[arg-type]
            each.grad = grad.clone()
        for optimizer in (muon, *references):
            optimizer.step()
    expected = [*theirs[:3], torch.stack(list(stacked)), theirs[4]]
    for one, other, first in zip(ours, expected, values, strict=True):
        assert (one - first).abs().max() > 1e-2
        torch.testing.assert_close(one, other, rtol=0, atol=2e-4)  # products in bfloat16


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_a_step_of_muon_has_equal_singular_values(shape: tuple[int, int]) -> None:
    """Up to the inaccuracy of five iterations, from singular values that differ by a factor of 100."""
    rank = min(shape)
    draw = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(size, rank, generator=draw))[0] for size in shape)
    matrix = left * torch.logspace(0, -2, rank) @ right.T
    step = orthogonalized(matrix) / (0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.3 and values.max() < 1.3
    assert (step * (left @ right.T)).sum() / rank > 0.7, "the same singular vectors"


def test_muon_takes_the_matrices_of_attention_and_mlp() -> None:
    keys = {"moe_num_experts": 4, "moe_top_k": 2, "moe_shared_intermediate_size": 32, "moe_shared_gate": True}
    config = configured(**keys, **{"optimizer.type": "Muon"}, engine="native", pos_emb="pope")
    model = build_model(config)
    train_only_parts(model, config.optimizer)
    names = {parameter: name.removeprefix("blocks.0.") for name, parameter in model.named_parameters()}
    first, *others = build_optimizer(model, config.optimizer).param_groups
    chosen = {names[each] for each in first["params"] if not names[each].startswith("blocks.1.")}
    projections = {f"attention.query_key_value.{name}.weight" for name in ("query", "key", "value")}
    assert projections | {"attention.dense.weight"} <= chosen
    assert all(".mlp." in f".{name}" for name in chosen - projections - {"attention.dense.weight"})
    rest = {names[each] for group in others for each in group["params"]}
    assert {"embedding.word_embeddings.weight", "mlp.router.weight", "mlp.shared_gate.weight"} <= rest, rest
    assert not any(each.dim() < 2 for each in first["params"])


@pytest.mark.parametrize("trainable", [["key"], ["query", "value", "mlp"], None])
def test_muon_trains_a_part_of_the_projections(trainable: list[str] | None) -> None:
    config = configured(trainable=trainable, engine="native", **{"optimizer.type": "Muon"})
    model = build_model(config)
    train_only_parts(model, config.optimizer)
    names = {id(parameter): name for name, parameter in model.blocks[0].named_parameters()}
    chosen = {names.get(id(each), "") for each in build_optimizer(model, config.optimizer).param_groups[0]["params"]}
    parts = {"query", "key", "value"} & set(trainable or ("query", "key", "value"))
    assert {name for name in chosen if "query_key_value" in name} == {
        f"attention.query_key_value.{part}.weight" for part in parts
    }


@pytest.mark.parametrize("keys", [{}, {"moe_num_experts": 3, "moe_top_k": 1}])
def test_muon_takes_value_and_gate_apart(keys: dict[str, Any]) -> None:
    config = configured(engine="native", activation="swiglu", **keys, **{"optimizer.type": "Muon"})
    model = build_model(config)
    _, pairs, *_ = build_optimizer(model, config.optimizer).param_groups
    assert [id(each) for each in pairs["params"]] == [id(block.mlp.linear1.weight) for block in model.blocks]
    grad = torch.randn(pairs["params"][0].shape, generator=torch.Generator().manual_seed(2))
    both = orthogonalized(grad, 2)
    parts = torch.cat([orthogonalized(part) for part in grad.chunk(2, -2)], -2)
    torch.testing.assert_close(both, parts, rtol=0, atol=2e-2)
    assert (both - orthogonalized(grad)).abs().max() > 0.1


def test_muon_takes_the_maps_of_latents() -> None:
    config = configured(kv_lora_rank=8, q_lora_rank=6, pos_emb="rotary", engine="native", **{"optimizer.type": "Muon"})
    model = build_model(config)
    train_only_parts(model, config.optimizer)
    chosen = {id(each) for each in build_optimizer(model, config.optimizer).param_groups[0]["params"]}
    for name, parameter in model.blocks[0].attention.named_parameters():
        assert (id(parameter) in chosen) == (parameter.dim() == 2), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "needs whole matrices, .*set engine=native"),
        ({"engine": "native", "lora": {"rank": 2}}, "is not supported with lora"),
        ({"optimizer.type": "Adam", "optimizer.params.momentum": 0.9}, "momentum: has no effect with Adam; remove it"),
    ],
)
def test_what_muon_does_not_support(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**({"optimizer.type": "Muon"} | keys))
