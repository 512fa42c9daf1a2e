"""Gated attention units: the paper's formula, gradients, documents, decoding, cost, and wrong combinations."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_coca import Attention, build_model, load_config
from megatron_coca.checkpoints.unsupported import lost_keys
from megatron_coca.commands.estimate import main as estimate
from megatron_coca.config import Config, ConfigError
from megatron_coca.model.cost import flops_per_token, parameter_count
from megatron_coca.training.estimate import stage_parameters
from megatron_coca.training.optimizer import trainable_share
from megatron_coca.training.topology import Topology
from tests.reference.gated_unit import gated_unit

LENGTH, WINDOW, FEATURES = 24, 5, 8
KEYS = {
    **{"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 12, "vocab_size": 48},
    **{"make_vocab_size_divisible_by": 1, "pos_emb": "rotary", "gau_key_width": FEATURES},
    **{"attention_config": ["gau", "global", "gau"], "init_method_std": 0.3, "output_layer_init_method": "normal"},
}
REROPE = {"relative_positions": {"type": "rerope", "window": WINDOW}}
LEAKY = {"relative_positions": {"type": "leaky_rerope", "window": WINDOW, "leak": 4}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rotary": ({}, {}),
    "ReRoPE, log n": (
        REROPE | {"logit_scaling": "log_n"},
        {
            "relative": lambda m, n: min(m - n, WINDOW),
            "factor": lambda m: max(1.0, math.log(m + 1) / math.log(12)),
        },
    ),
    "Leaky ReRoPE": (
        LEAKY,
        {"relative": lambda m, n: m - n if m - n < WINDOW else WINDOW + (m - n - WINDOW) / 4},
    ),
}
OTHERS = {
    "coca": {"pos_emb": "coca"},
    "pope": {"pos_emb": "pope", "pos_emb_options": {"offset": "uniform"}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "ntk": {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}},
    "none": {"pos_emb": "none"},
}


def configured(**keys: Any) -> Config:
    return load_config([], KEYS | keys)


def tokens(length: int = LENGTH, batch: int = 2) -> Tensor:
    return torch.randint(48, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_formula(case: str, backend: str) -> None:
    keys, reference = CASES[case]
    model = build_model(configured(attention_backend=backend, **keys)).double().eval()
    layer = model.blocks[0].attention
    with torch.no_grad():  # biases, scales and offsets that differ
        for number, weight in enumerate(layer.parameters()):
            weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    theta = 10000.0 ** (-torch.arange(0, FEATURES, 2, dtype=torch.float64) / FEATURES)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, 16, dtype=torch.float64, generator=generator).requires_grad_()
    contexts = model.contexts(torch.arange(LENGTH), LENGTH, torch.float64)
    inputs = [x, *layer.parameters()]
    made = layer(x[None], contexts["gau"])[0]
    wanted = gated_unit(x, dict(layer.named_parameters()), theta, **reference)
    torch.testing.assert_close(made, wanted, rtol=1e-10, atol=1e-11)
    weights = torch.randn(made.shape, dtype=torch.float64, generator=generator)
    pairs = zip(torch.autograd.grad(made, inputs, weights), torch.autograd.grad(wanted, inputs, weights), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("keys", [case[0] for case in CASES.values()] + list(OTHERS.values()), ids=[*CASES, *OTHERS])
@torch.no_grad()
def test_documents_stay_apart_and_decoding_agrees(keys: dict[str, Any]) -> None:
    model, ids = build_model(configured(**keys)).eval().double(), tokens()
    documents = (torch.arange(LENGTH) >= 10).long().expand(2, -1)
    packed = model.hidden_states(ids, documents=documents, length=LENGTH)
    for span in (slice(0, 10), slice(10, LENGTH)):
        alone = model.hidden_states(ids[:, span], length=LENGTH)
        torch.testing.assert_close(packed[:, span], alone, rtol=1e-9, atol=1e-10)
    whole, cache = model(ids), model.new_cache(LENGTH)
    steps = [model(part, cache=cache) for part in ids.split((7, 1, 9, 7), dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-9, atol=1e-10)
    dense = build_model(configured(attention_backend="reference", **keys)).eval().double()
    torch.testing.assert_close(dense(ids), whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("offset", ["none", "uniform"])
def test_magnitudes_of_polar_forms_have_one_head_for_all_pieces_of_values(offset: str) -> None:
    """The Triton kernels compute Q' and K' for every piece; its head has the same constant angles."""
    pytest.importorskip("triton")
    keys = {"pos_emb": "pope", "pos_emb_options": {"offset": offset}, "attention_config": [[["gau"], 3]]}
    found = []
    for backend in ("triton", "reference"):
        model = build_model(configured(attention_backend=backend, **keys)).eval()
        logits = model(tokens())
        found.append([logits, *torch.autograd.grad(logits.sin().sum(), list(model.parameters()))])
        assert model.methods["gau"].magnitudes == (backend == "triton")
    for got, expected in zip(*found, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


@torch.no_grad()
def test_attention_for_a_network_of_ones_own_is_the_unit_of_a_model() -> None:
    model, own, x = build_model(configured()).eval(), Attention(configured()).eval(), torch.randn(2, LENGTH, 16)
    own.attention.load_state_dict(model.blocks[0].attention.state_dict())
    assert torch.equal(
        own(x), model.blocks[0].attention(x, model.contexts(torch.arange(LENGTH), LENGTH, x.dtype)["gau"])
    )


def test_recomputed_gradients_are_the_same_and_every_weight_has_one() -> None:
    gradients = []
    for policy in (None, "full", "selective"):
        given = {} if policy is None else {"checkpoint_activations": True, "checkpoint_policy": policy}
        model = build_model(configured(**given)).train()
        model.loss(model.hidden_states(tokens()), tokens()).backward()
        assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())
        gradients.append([weight.grad for weight in model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("keys", [{}, {"norm_position": "sandwich"}, {"use_bias_in_attn_linear": False}])
def test_cost(keys: dict[str, Any]) -> None:
    config = configured(**keys)
    total = sum(weight.numel() for weight in build_model(config).parameters())
    assert parameter_count(config).total == trainable_share(config).trained == total
    assert stage_parameters(config, Topology(1, 1, 1, 1))[0][0] == total


def test_flops() -> None:
    """Of one layer of 16 -> 2 x 32 + 8 and 32 -> 16, scores of 8 features in each of 4 pieces of the values."""
    flops = flops_per_token(configured(num_layers=1, attention_config=["gau"]), 12)
    products = 2 * (16 * (64 + 8) + 32 * 16 + 48 * 16)
    assert flops.forward == products + 2 * (8 * 4 + 32) * 6.5
    assert flops.model == 3 * (products + 2 * (8 + 32) * 12)


def test_initial_weights() -> None:
    layer = build_model(configured()).blocks[0].attention
    assert layer.query_scale.eq(1).all() and layer.key_scale.eq(1).all()
    assert not any(weight.any() for name, weight in layer.named_parameters() if name.endswith(("bias", "offset")))
    assert 0.25 < layer.gate_value_base.weight.std().item() < 0.35


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gau_width": 20}, "does not divide the 20 value features"),
        ({"pos_emb": "alibi"}, "gau do not support pos_emb alibi"),
        ({"sink_logits": True}, "gau do not support sink_logits"),
        ({"forgetting_gate": "fox"}, "gau do not support forgetting_gate"),
        ({"logit_scaling": "ssmax"}, "gau do not support logit_scaling ssmax"),
        ({"attention_output_gate": "head"}, "gau do not support attention_output_gate"),
        ({"attention_dropout": 0.1}, "gau do not support attention_dropout"),
        ({"model_parallel_size": 2}, "gau do not support model_parallel_size"),
        ({"sequence_parallel_size": 2}, "gau do not support sequence_parallel_size"),
        ({"pipe_parallel_size": 2}, "gau do not support pipe_parallel_size"),
        ({"trainable": ["query"]}, "gau do not support trainable"),
        ({"gau_key_width": 1}, "features per head"),
    ],
)
def test_contradicting_switches_are_errors(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**keys)


def test_exports_name_its_key_in_an_error() -> None:
    reasons = list(lost_keys(configured(attention_config=[[["gau"], 3]]), frozenset()))
    assert any(reason.startswith("layer_types") and "gau" in reason for reason in reasons)


def test_the_tool_estimates_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate(["configs/100M/gau.yml"]) == 0
    assert "125,952,768" in capsys.readouterr().out
