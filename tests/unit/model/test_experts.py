"""Mixtures of experts: the choices of routers, what balances them, and recomputed activations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca.config import ConfigError, load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.model.experts import Balancing, ExpertRouter, mixtures_of

KEYS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 60,
    "make_vocab_size_divisible_by": 1,
    "pos_emb": "coca",
    "mlp_config": ["dense", "experts", "experts"],
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "init_method_std": 0.3,
}
LOSS, Z, RATE = 0.5, 0.25, 0.125


def samples(seed: int = 0) -> Tensor:
    return torch.randint(60, (3, 17), generator=torch.Generator().manual_seed(seed))


def objective(loss: float = LOSS, z: float = Z, **keys: Any) -> LanguageModelLoss:
    model = build_model(load_config([], KEYS | keys)).double()
    return LanguageModelLoss(model, Balancing(mixtures_of(model), loss, z, RATE)).train()


def router(**keys: Any) -> ExpertRouter:
    torch.manual_seed(0)
    found = ExpertRouter(load_config([], KEYS | keys).model).double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return found


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_and_losses_follow_their_formulas(scores: str) -> None:
    keys = {"moe_router_scores": scores, "moe_norm_topk_prob": True, "moe_routed_scaling_factor": 1.5}
    layer, x = router(**keys), torch.randn(11, 24, dtype=torch.float64)
    found, logits = layer(x), x @ layer.weight.detach().T
    every = logits.sigmoid() if scores == "sigmoid" else logits.exp() / logits.exp().sum(-1, keepdim=True)
    balance, load = 0.0, [0] * 6
    for token in range(11):
        best = sorted(range(6), key=lambda expert: -every[token, expert])[:2]
        assert found.experts[token].tolist() == best
        picked = every[token, best]
        torch.testing.assert_close(found.weights[token], 1.5 * picked / picked.sum())
        for expert in best:
            load[expert] += 1
    for expert in range(6):
        balance += 6 * load[expert] / 22 * float((every[:, expert] / every.sum(-1)).mean())
    assert found.load.tolist() == load
    assert float(found.balance.detach()) == pytest.approx(balance, rel=1e-12)
    assert float(found.z.detach()) == pytest.approx(float(logits.exp().sum(-1).log().square().mean()), rel=1e-12)


def test_a_correction_changes_the_choice_and_not_the_weights() -> None:
    layer, x = router(moe_correction_bias=True), torch.randn(9, 24, dtype=torch.float64)
    assert layer.correction_bias is not None and not layer.correction_bias.requires_grad
    with torch.no_grad():
        layer.correction_bias.zero_()[4] = 2.0
    found = layer(x)
    assert (found.experts[:, 0] == 4).all()
    torch.testing.assert_close(found.weights, (x @ layer.weight.T).softmax(-1).gather(-1, found.experts))


def test_only_the_best_groups_are_chosen() -> None:
    layer, x = router(moe_num_groups=3, moe_top_k_groups=1), torch.randn(40, 24, dtype=torch.float64)
    found, scores = layer(x), (x @ layer.weight.T).softmax(-1)
    for token, row in enumerate(scores):
        group = max(range(3), key=lambda number: row[2 * number] + row[2 * number + 1])
        assert sorted(found.experts[token].tolist()) == [2 * group, 2 * group + 1]


def test_a_correction_stays_in_float32() -> None:
    layer = ExpertRouter(load_config([], KEYS | {"moe_correction_bias": True}).model)
    assert layer.correction_bias is not None
    with torch.no_grad():
        layer.correction_bias.fill_(1.001)
    before = layer.correction_bias
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16 and layer.correction_bias is before
    assert layer.correction_bias.dtype == torch.float32 and bool((layer.correction_bias == 1.001).all())
    with torch.device("meta"):
        empty = ExpertRouter(load_config([], KEYS | {"moe_correction_bias": True}).model)
    empty = empty.to(torch.bfloat16).to_empty(device="cpu")
    assert empty.correction_bias is not None and empty.correction_bias.dtype == torch.float32


@pytest.mark.parametrize("z", [0.0, Z])
def test_balancing_adds_its_gradient_and_not_its_value(z: float) -> None:
    plain, balanced = objective(0.0, 0.0), objective(LOSS, z)
    first, second = plain(samples()), balanced(samples())
    assert torch.equal(first, second)
    first.backward()
    second.backward()
    step = balanced.balancing.take()
    assert step is not None and plain.balancing.take() is not None and plain.balancing.take() is None
    assert step.load.shape == (2, 6) and step.load.sum(-1).tolist() == [96, 96]
    # The gradient that was added, against a difference quotient of the losses along one direction.
    weight, other = (each.model.blocks[1].mlp.router.weight for each in (plain, balanced))
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    size, sums = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * size)
        plain(samples())
        routed = plain.balancing.take()
        assert routed is not None and torch.equal(routed.load, step.load)
        sums.append(float(LOSS * routed.balance.mean() + z * routed.z.mean()))
        with torch.no_grad():
            weight.add_(direction, alpha=-sign * size)
    assert weight.grad is not None and other.grad is not None
    added = float(((other.grad - weight.grad) * direction).sum())
    assert added == pytest.approx((sums[0] - sums[1]) / (2 * size), rel=1e-4) and abs(added) > 1e-3


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_activations_give_the_same_gradients(policy: str) -> None:
    keys = {"checkpoint_activations": True, "checkpoint_num_layers": 2, "checkpoint_policy": policy}
    kept, recomputed = objective(), objective(**keys)
    for each in (kept, recomputed):
        each(samples()).backward()
    for (name, weight), other in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        assert (weight.grad is None) == (other.grad is None), name
        assert weight.grad is None or torch.equal(weight.grad, other.grad), name
    loads = [each.balancing.take() for each in (kept, recomputed)]
    assert torch.equal(loads[0].load, loads[1].load), "a recomputed pass does not count"


def test_the_rule_raises_experts_below_the_mean() -> None:
    trained = objective(moe_correction_bias=True)
    load = torch.tensor([[1, 9, 5, 5, 5, 5], [0, 0, 0, 30, 0, 0]])
    trained.balancing.update(load)
    found = [each.router.correction_bias.tolist() for each in trained.balancing.mixtures]
    assert found == [[RATE, -RATE, 0, 0, 0, 0], [RATE, RATE, RATE, -RATE, RATE, RATE]]


def test_passes_without_gradients_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = objective(moe_shared_intermediate_size=9).model.eval()
    whole = model(samples())
    monkeypatch.setattr("megatron_coca.model.layers.TOKENS_AT_ONCE", 7)
    with torch.no_grad():
        torch.testing.assert_close(model(samples()), whole)


def test_two_runs_of_a_step_are_equal() -> None:
    first, second = objective().float(), objective().float()
    for each in (first, second):
        each(samples()).backward()
    assert all(
        torch.equal(one.grad, other.grad)
        for one, other in zip(first.parameters(), second.parameters(), strict=True)
        if one.grad is not None
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"moe_top_k": 7}, "moe_top_k: 7 exceeds moe_num_experts 6"),
    "layers": (
        {"mlp_config": ["dense", "expert", "experts"]},
        "mlp_config: unknown type 'expert'; use dense or experts",
    ),
    "number of layers": ({"mlp_config": ["experts"]}, "mlp_config: covers 1 layers, but num_layers is 3"),
    "interval": ({"moe_expert_interval": 2}, "mlp_config: contradicts moe_expert_interval"),
    "no experts": (
        {"moe_num_experts": 1, "moe_top_k": 1},
        "mlp_config: has layers of experts, but moe_num_experts is 1",
    ),
    "only dense": ({"mlp_config": [[["dense"], 3]]}, "mlp_config: no layer has experts"),
    "sinkhorn": (
        {"moe_router_type": "sinkhorn"},
        "moe_router_type: sinkhorn is not supported; set moe_router_type=topk",
    ),
    "groups": ({"moe_num_groups": 4}, "moe_num_groups: 6 experts cannot form 4 equal groups of two or more"),
    "chosen groups": ({"moe_top_k_groups": 2}, "moe_num_groups: moe_top_k_groups 2 exceeds moe_num_groups 1"),
    "choices": ({"moe_num_groups": 3, "moe_top_k": 3}, "moe_num_groups: moe_top_k 3 exceeds the 2 experts of 1 groups"),
    "xielu": ({"activation": "xielu"}, "activation: xielu is not supported with moe_num_experts"),
    "clamped": (
        {"activation": "clamped_swiglu", "moe_num_experts": 1, "moe_top_k": 1, "mlp_config": None},
        "activation: clamped_swiglu is supported only in mixtures",
    ),
    "gate": ({"moe_shared_gate": True}, "moe_shared_gate: there is no shared MLP; set moe_shared_intermediate_size"),
    "rule": ({"moe_bias_update_rate": 0.1}, "moe_bias_update_rate: there are no numbers to update"),
    "rule, ZeRO 3": (
        {"moe_bias_update_rate": 0.1, "moe_correction_bias": True, "zero_optimization": {"stage": 3}},
        "moe_bias_update_rate: not supported with ZeRO 3",
    ),
    "tensor": (
        {"model_parallel_size": 2},
        "moe_num_experts: not supported with model_parallel_size, because DeepSpeed",
    ),
    "sequence": ({"sequence_parallel_size": 2}, "moe_num_experts: not supported with sequence_parallel_size"),
    "context": ({"context_parallel_size": 2}, "moe_num_experts: not supported with context_parallel_size"),
    "pipeline": ({"pipe_parallel_size": 2}, "moe_num_experts: not supported with pipe_parallel_size"),
    "units": (
        {"attention_config": ["gau", "global", "gau"], "gau_key_width": 24},
        "not supported with layers of type gau",
    ),
    "graphs": ({"cuda_graphs": True, "engine": "native"}, "moe_num_experts: not supported with cuda_graphs"),
    "compiled": ({"torch_compile": True}, "torch_compile: not supported with moe_num_experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_an_error(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config([], KEYS | changes)


def test_the_layers_of_an_interval_are_those_of_gpt_neox() -> None:
    found = load_config([], KEYS | {"mlp_config": None, "moe_expert_interval": 2, "num_layers": 5})
    assert found.model.mlp_names == ("experts", "dense", "experts", "dense", "experts") and found.model.mixtures == 3
