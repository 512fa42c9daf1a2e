"""Adapters that peft adds to our modules: what trains, the first values, and names in checkpoints."""

import sys
from typing import Any

import pytest
import torch

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import GPT, build_model
from megatron_coca.training.adapters import add_adapters, checkpoint_name
from megatron_coca.training.engine.state import saved_names
from megatron_coca.training.optimizer import parameter_groups

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "seq_length": 16,
    "vocab_size": 64,
    "no_weight_tying": True,
    "pos_emb": "rotary",
}


def adapted(seed: int = 1, lora: dict[str, Any] | None = None, **keys: Any) -> tuple[GPT, Config]:
    config = load_config([], SHAPE | {"lora": {"rank": 4} | (lora or {})} | keys)
    model = build_model(config)
    assert config.optimizer.lora is not None
    add_adapters(model, config.optimizer.lora, seed)
    return model, config


def learning(model: GPT) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_only_adapters_train_and_the_function_is_the_same() -> None:
    model, config = adapted()
    ids = torch.randint(64, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), build_model(config)(ids))
    names = learning(model)
    assert names == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(names) == 2 * 4 * 2
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            assert not weight.any()
        if ".lora_A." in name:
            assert weight.shape == (4, 32) and weight.any()


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"targets": ["dense"]}, {"attention.dense"}),
        ({"targets": ["mlp", "query"]}, {"mlp.linear1", "mlp.linear2", "attention.query_key_value.query"}),
        ({"targets": ["value"], "dora": True}, {"attention.query_key_value.value"}),
    ],
)
def test_targets(lora: dict[str, Any], expected: set[str]) -> None:
    model, _ = adapted(lora=lora)
    found = {name.partition(".lora_")[0].partition("blocks.0.")[2] for name in learning(model)} - {""}
    assert found == expected
    packed = model.blocks[0].attention.query_key_value
    assert isinstance(packed, torch.nn.Linear) == (lora["targets"] == ["dense"]), "split only if needed"


def test_parts_beside_the_adapters_are_trained_as_a_whole() -> None:
    model, _ = adapted(lora={"targets": ["query"], "also": ["key", "norms", "embedding"]})
    whole = {name for name in learning(model) if ".lora_" not in name}
    assert whole == {
        "embedding.word_embeddings.weight",
        *(f"blocks.{i}.attention.query_key_value.key.{kind}" for i in range(2) for kind in ("weight", "bias")),
        *(
            f"blocks.{i}.{norm}_layernorm.{kind}"
            for i in range(2)
            for norm in ("input", "post_attention")
            for kind in ("weight", "bias")
        ),
        *(f"norm.{kind}" for kind in ("weight", "bias")),
    }


@pytest.mark.parametrize(
    ("part", "expected"), [("router", {"router.weight"}), ("mlp", {"linear1.weight", "linear2.weight"})]
)
def test_experts_and_routers_as_a_whole(part: str, expected: set[str]) -> None:
    experts = {"moe_num_experts": 4, "mlp_config": ["dense", "experts"], "use_bias_in_mlp": False}
    model, _ = adapted(lora={"also": [part]}, moe_correction_bias=True, **experts)
    own = "blocks.1.mlp."
    assert {name.removeprefix(own) for name in learning(model) if name.startswith(own)} == expected
    assert any(name.startswith("blocks.0.mlp.") for name in learning(model)) == (part == "mlp"), "the dense MLP too"


def test_initial_values_depend_on_the_seed_only() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first, again, other = (dict(adapted(seed)[0].named_parameters()) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    name = "blocks.0.attention.dense.lora_A.default.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_names_in_checkpoints() -> None:
    model, _ = adapted(lora={"dora": True, "targets": ["dense"], "also": ["norms"]})
    names = set(saved_names(model, True).values())
    assert {
        "blocks.1.attention.dense.lora_A.weight",
        "blocks.1.attention.dense.lora_magnitude_vector.weight",
        "norm.weight",
    } <= names
    assert not any("default" in name or "base_layer" in name for name in names)
    assert checkpoint_name("norm.default.weight") == "norm.default.weight"
    plain = build_model(load_config([], SHAPE))
    assert set(saved_names(plain, False).values()) == set(plain.state_dict()), "without adapters, frozen weights too"


def test_decay_is_that_of_other_weights() -> None:
    model, _ = adapted(lora={"dora": True, "targets": ["dense"], "also": ["norms"]})
    decayed, kept = parameter_groups(model, 0.1)
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert {names[id(weight)].split(".")[-3] for weight in decayed["params"]} == {"lora_A", "lora_B"}
    assert all("magnitude" in name or "norm." in name for name in (names[id(weight)] for weight in kept["params"]))


def test_drawn_angles_stay_frozen() -> None:
    keys = {"pos_emb": "coca_strict", "pos_emb_options": {"initial_angle": "random"}}
    model, _ = adapted(lora={"also": ["norms"]}, **keys)
    assert not model.blocks[0].attention.position_offsets.bias.requires_grad


def test_peft_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora: peft is not installed; .*megatron-coca\[adapters\]"):
        adapted()


def test_recomputed_blocks_draw_the_same_dropout_of_adapters() -> None:
    """The gradients with and without activation checkpointing have the same bits."""
    found = []
    for recomputed in (False, True):
        keys = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "checkpoint_activations": recomputed}
        model, _ = adapted(lora={"dropout": 0.5}, **keys)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".lora_B." in name:
                    weight.fill_(0.1)
        torch.manual_seed(3)
        model.train()(torch.arange(32).reshape(2, 16)).float().square().mean().backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert found[0].keys() == found[1].keys() != set()
    for name, gradient in found[0].items():
        assert gradient is not None and torch.equal(gradient, found[1][name]), name
