"""The maximal update parametrization: kinds of weights, factors of the forward pass, initial values, rates, decays."""

import math
import re
from typing import Any

import pytest
import torch
import yaml

from megatron_coca.attention.build import build_methods
from megatron_coca.attention.method import PositionEncoding
from megatron_coca.config import Config, load_config
from megatron_coca.config.optimization import LoraConfig
from megatron_coca.model import GPT, build_model
from megatron_coca.model.width_scaling import CONSTANT, HIDDEN, KINDS, TO_FEW, kind_of, rate_factor
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.optimizer import build_optimizer, set_rates

BASE, WIDTH = 32, 128
RATIO = WIDTH / BASE
KEYS: dict[str, Any] = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 4, "seq_length": 16}
KEYS |= {"vocab_size": 64, "pos_emb": "coca", "optimizer.params.lr": 0.01, "init_method_std": 0.05}
MUP = {"use_mup": True, "mup_base_hidden_size": BASE}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"no_weight_tying": True, "qk_norm": "projection", "attention_output_gate": "feature"},
    "learned positions": {"pos_emb": "learned", "norm_position": "residual", "layer_scale": True, "norm": "rmsnorm"},
    "kerple": {
        "pos_emb": "kerple_log",
        "sink_logits": True,
        "attention_backend": "reference",
        "attention_output_gate": "head",
        "use_embedding_norm": True,
    },
    "FIRE": {"pos_emb": "fire", "forgetting_gate": "fox"},
    "PoPE": {"pos_emb": "pope", "logit_scaling": {"type": "ssmax"}, "activation": "xielu"},
    "clex": {"rope_scaling": {"rope_type": "clex", "max_factor": 2}, "use_output_transform": True},
    "latents": {"kv_lora_rank": 24, "q_lora_rank": 20, "pos_emb": "rotary"},
    "latents, whole queries": {"kv_lora_rank": 24, "pos_emb": "rotary"},
    "experts": {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_bias": True}
    | {"moe_shared_intermediate_size": 64, "moe_shared_gate": True, "activation": "swiglu"},
}


def configured(**keys: Any) -> Config:
    return load_config([], KEYS | keys)


def model_of(**keys: Any) -> GPT:
    return build_model(configured(**keys))


def test_every_parameter_has_a_kind_and_every_kind_a_parameter() -> None:
    matched: set[str] = set()
    for keys in MODELS.values():
        for name, parameter in model_of(**keys).named_parameters():
            kind = kind_of(name)
            assert kind is CONSTANT or parameter.dim() >= 2, name
            matched |= {next(pattern for pattern, _ in KINDS if pattern_of(pattern, name))}
    assert {pattern for pattern, _ in KINDS} - matched == {r"\.lora_A(\.|$)", r"\.lora_"}


def pattern_of(pattern: str, name: str) -> bool:
    return re.search(pattern, name) is not None


def test_a_kind_is_that_of_the_shapes_at_two_widths() -> None:
    """The number of inputs of a matrix decides its rate. The outputs of a router do not grow."""
    widths = {"intermediate_size": 3, "kv_lora_rank": 1, "q_lora_rank": 1, "moe_shared_intermediate_size": 2}
    heads = {"num_attention_heads": 4}
    for name, keys in MODELS.items():
        shapes = []
        for width in (64, 128):
            grown = {key: factor * width for key, factor in widths.items() if key in keys or key == "intermediate_size"}
            model = model_of(**KEYS | heads | keys | grown | {"hidden_size": width})
            shapes.append({each: tuple(weight.shape[-2:]) for each, weight in model.named_parameters()})
        for each, (*_, inputs) in shapes[0].items():
            kind, other = kind_of(each), shapes[1][each]
            if each.endswith("weight") and len(other) == 2 and kind is not CONSTANT:
                assert other[1] == 2 * inputs, f"{name}: {each}"
                per_head = "position_gates" in each or "output_gate" in each
                assert (other[0] == 2 * shapes[0][each][0]) == (kind is HIDDEN) or per_head, f"{name}: {each}"
            elif kind is CONSTANT and len(other) == 2 and other[1] != inputs:
                own = ("word_embeddings", "position_embeddings", "final_linear", "positions.", "norm", "position_")
                assert any(part in each for part in own) or each.endswith("bias"), f"{name}: {each}"


def test_factors_of_the_forward_pass_are_keys_of_the_model() -> None:
    model = configured(**MUP, mup_attn_temp=0.5, mup_output_temp=2.0, mup_embedding_mult=3.0).model
    assert model.width_ratio == RATIO
    assert (model.embedding_scale, model.softmax_scale) == (3.0, 1 / (0.5 * 32))
    assert model.final_logit_scale == 1 / (2.0 * RATIO)
    plain = configured().model
    assert (plain.width_ratio, plain.embedding_scale, plain.softmax_scale, plain.final_logit_scale) == (1, 1, None, 1)
    latent = configured(**MUP, **MODELS["latents"]).model
    assert latent.softmax_scale == 1 / latent.score_dim


def test_a_recorded_configuration_reads_back_and_a_changed_width_changes_the_factors() -> None:
    config = configured(**MUP)
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    wider = config.override({"hidden_size": 2 * WIDTH})
    assert wider.model.final_logit_scale == 1 / (2 * RATIO) and wider.model.softmax_scale == 1 / 64


@pytest.mark.parametrize("tied", [True, False])
def test_initial_values(tied: bool) -> None:
    keys: dict[str, Any] = {"no_weight_tying": not tied, "moe_num_experts": 16, "output_layer_init_method": "normal"}
    weights = dict(model_of(**keys, **MUP, mup_init_scale=2.0).named_parameters())
    factors = {HIDDEN: RATIO**-0.5, TO_FEW: 1 / RATIO, CONSTANT: 1.0}
    seen = set()
    for name, weight in weights.items():
        if weight.dim() >= 2 and not name.endswith("bias"):
            expected = 2.0 * 0.05 * factors[kind_of(name)]
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.05), name
            seen.add(kind_of(name))
    assert seen == factors.keys()


@pytest.mark.parametrize("method", ["small_init", "wang_init", "scaled_normal", "single_residual_scaled_normal"])
def test_methods_that_read_the_width_read_that_of_the_base_model(method: str) -> None:
    keys = {"init_method": method, "output_layer_init_method": method, "no_weight_tying": True}
    base, wide = (dict(model_of(**keys, **MUP, hidden_size=width).named_parameters()) for width in (BASE, WIDTH))
    plain = dict(model_of(**keys, hidden_size=BASE).named_parameters())
    for name, weight in base.items():
        assert torch.equal(weight, plain[name]), name
        if weight.dim() == 2:
            expected = float(weight.detach().std()) * RATIO ** kind_of(name).deviation
            assert float(wide[name].detach().std()) == pytest.approx(expected, rel=0.1), name


def test_forgetting_gates_and_learned_positions_are_scaled() -> None:
    gates = model_of(forgetting_gate="fox", **MUP, mup_init_scale=2.0).blocks[0].attention.position_gates
    assert float(gates.projection.weight.detach().std()) == pytest.approx(2 * 0.05 * RATIO**-0.5, rel=0.1)
    table = model_of(pos_emb="learned", **MUP, mup_init_scale=2.0).embedding.position_embeddings
    assert float(table.weight.detach().std()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("optimizer", ["AdamW", "lion", "Muon"])
@pytest.mark.parametrize("keys", [MODELS["plain"], MODELS["experts"]], ids=["plain", "experts"])
def test_rates_and_decays_of_the_groups(optimizer: str, keys: dict[str, Any]) -> None:
    """A step shrinks weights by the same share at every width."""
    engine = {"engine": "native"} if optimizer == "Muon" else {}
    config = configured(**keys, **engine, **MUP, **{"optimizer.type": optimizer, "weight_decay": 0.3})
    model = build_model(config)
    groups = build_optimizer(model, config.optimizer, width_ratio=config.model.width_ratio).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert sorted(names[id(each)] for group in groups for each in group["params"]) == sorted(names.values())
    for rate in (0.01, 0.002):
        for group in groups:
            for each in group["params"]:
                orthogonal = optimizer == "Muon" and kind_of(names[id(each)]) is HIDDEN
                factor = rate_factor(names[id(each)], RATIO, orthogonal)
                expected = {HIDDEN: RATIO**-0.5 if orthogonal else 1 / RATIO, TO_FEW: 1 / RATIO, CONSTANT: 1.0}
                assert factor == expected[kind_of(names[id(each)])]
                assert group["lr"] == rate * factor, names[id(each)]
                decays = each.dim() >= 2 and not names[id(each)].endswith("bias")
                assert math.isclose(group["weight_decay"] * group["lr"], 0.3 * rate * decays), names[id(each)]
        set_rates(groups, 0.002)


def test_groups_without_it_are_unchanged() -> None:
    config = configured(**MODELS["plain"])
    model = build_model(config)
    groups = build_optimizer(model, config.optimizer).param_groups
    assert len(groups) == 2 and all("rate_factor" not in group for group in groups)
    set_rates(groups, 0.1 + 0.2)
    assert all(group["lr"] == 0.1 + 0.2 for group in groups)


def test_adapters_have_rates_by_their_number_of_inputs() -> None:
    pytest.importorskip("peft")
    config = configured(**MUP)
    model = build_model(config)
    add_adapters(model, LoraConfig(rank=4, dora=True, targets=["query", "mlp"], also=["norms", "embedding"]), 0)
    groups = build_optimizer(model, config.optimizer, width_ratio=RATIO).param_groups
    rates = {id(each): group["lr"] for group in groups for each in group["params"]}
    trained = {name: rates[id(each)] for name, each in model.named_parameters() if each.requires_grad}
    assert {rate for name, rate in trained.items() if ".lora_A." in name} == {0.01 / RATIO}
    assert {rate for name, rate in trained.items() if ".lora_A." not in name} == {0.01}
    assert {name.partition(".lora_")[2].partition(".")[0] for name in trained} == {"A", "B", "magnitude_vector", ""}


@pytest.mark.parametrize("method", ["coca", "coca_strict", "rotary"])
def test_first_scores_by_the_width_of_a_head(method: str) -> None:
    """docs/proofs.md: with features of size 1, first scores of CoCA at distance 0 have the mean d / (2 sqrt(pi)).
    Those of RoFormer have the mean 0 and the size sqrt(d).
    """
    generator, numbers = torch.Generator().manual_seed(0), 4000
    for head_dim in (16, 64, 256):
        config = configured(hidden_size=4 * head_dim, mup_base_hidden_size=64, use_mup=True, pos_emb=method)
        positions = PositionEncoding(build_methods(config)["global"])
        shape = numbers, 4, 1, head_dim
        q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        context = positions(torch.arange(1), 1, torch.float64)
        inputs = positions.method.prepare(q, k, k, context)
        assert inputs.scale == 1 / head_dim
        scores = (inputs.query * inputs.key).sum(-1)
        mean = 0.0 if method == "rotary" else head_dim / (2 * math.sqrt(math.pi))
        # The error of a mean of 16,000 scores, whose deviation is at most 2.3 sqrt(d).
        assert float(scores.mean()) == pytest.approx(mean, abs=0.1 * math.sqrt(head_dim))
        if method == "rotary":
            assert float(scores.std()) == pytest.approx(math.sqrt(head_dim), rel=0.05)
