"""Costs from the configuration: parameters against built models, operations against PyTorch's own counter."""

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_coca.config import Config, ConfigError, load_config
from megatron_coca.model import GPT, LanguageModelLoss, build_model
from megatron_coca.model.cost import adapter_count, flops_per_token, parameter_count, peak_flops, trained_count
from megatron_coca.training.adapters import add_adapters
from megatron_coca.training.optimizer import train_only_parts, trainable_share

ROOT = Path(__file__).parents[3]
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 200,
    "pos_emb": "rotary",
}


def tiny(**changes: Any) -> Config:
    return load_config([], TINY | changes)


def built(config: Config) -> dict[str, int]:
    return {name: parameter.numel() for name, parameter in build_model(config).named_parameters()}


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"no_weight_tying": True},
    "grouped": {"num_kv_heads": 2},
    "gated": {"activation": "swiglu", "mlp_multiple_of": 8},
    "wide": {"intermediate_size": 100},
    "factor": {"expansion_factor": 3.5},
    "no biases": {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "use_bias_in_norms": False},
    "gated without biases": {"activation": "geglu", "use_bias_in_mlp": False},
    "rmsnorm": {"norm": "rmsnorm"},
    "scalenorm": {"norm": "scalenorm"},
    "no norm weights": {"norm": "non_parametric_layernorm"},
    "norms of sums, a narrow embedding": {"norm_position": "residual", "embedding_width": 24},
    "a tied head with a bias": {"use_bias_in_output_head": True},
    "a transform before the head, no first norm": {"use_output_transform": True, "skip_first_norm": True},
    "untied, a narrow embedding": {"no_weight_tying": True, "embedding_width": 24},
    "parallel": {"gpt_j_residual": True},
    "parallel, one norm": {"gpt_j_residual": True, "gpt_j_tied": True},
    "clex": {"rope_scaling": {"rope_type": "clex"}, "rotary_pct": 0.5},
    "rpe": {"pos_emb": "rpe", "rpe_num_buckets": 16},
    "kerple_log": {"pos_emb": "kerple_log"},
    "kerple_power": {"pos_emb": "kerple_power"},
    "learned": {"pos_emb": "learned", "max_position_embeddings": 64},
    "coca": {"pos_emb": "coca"},
    "alibi": {"pos_emb": "alibi"},
    "heads by layer type": {
        "attention_config": ["local", "global"],
        "layer_types": {"local": {}},
        "head_shapes": {"local": {"kv_channels": 6, "num_kv_heads": 4, "values_from_keys": False}},
        "kv_channels": 20,
        "num_kv_heads": 2,
        "values_from_keys": True,
        "value_norm": True,
        "qk_norm": "head",
    },
    "experts": {"moe_num_experts": 5, "moe_top_k": 2, "activation": "swiglu", "moe_intermediate_size": 20},
    "experts, a shared MLP": {
        "mlp_config": ["dense", "experts"],
        "moe_num_experts": 6,
        "moe_shared_intermediate_size": 24,
        "moe_correction_bias": True,
        "use_bias_in_mlp": False,
    },
    "experts, a gated MLP, biases": {
        "moe_num_experts": 3,
        "moe_expert_interval": 2,
        "moe_shared_intermediate_size": 24,
        "moe_shared_gate": True,
        "moe_router_bias": True,
        "activation": "clamped_swiglu",
    },
    "latents": {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_rope_head_dim": 6, "v_head_dim": 10},
    "latents, gated features, no latent of queries": {
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 9,
        "qk_rope_head_dim": 4,
        "attention_output_gate": "feature",
        "use_bias_in_qkv": False,
    },
    "gated heads": {"attention_output_gate": "head", "kv_channels": 20},
    "gated features": {"attention_output_gate": "feature", "use_bias_in_attn_linear": False, "num_kv_heads": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_parameters_are_those_of_the_built_model(shape: dict[str, Any]) -> None:
    config = tiny(**shape)
    state = torch.get_rng_state()
    count, sizes = parameter_count(config), built(config)
    assert torch.equal(torch.get_rng_state(), state), "a resumed run counts after it has restored the generators"
    assert count.total == sum(sizes.values())
    parts = {
        "embedding": lambda name: "word_embeddings" in name or "embedding.projection" in name,
        "head": lambda name: "final_" in name or re.search("output_transform.(weight|dense)", name),
        "norms": lambda name: "norm" in name,
        "mlp": lambda name: ".mlp." in name,
        "attention": lambda name: ".attention." in name and "norm" not in name and ".position_" not in name,
    }
    for part, belongs in parts.items():
        assert getattr(count, part) == sum(size for name, size in sizes.items() if belongs(name)), part


@pytest.mark.parametrize("path", sorted((ROOT / "configs/350M").glob("*.yml")), ids=lambda path: path.stem)
def test_the_350m_models_with_one_layer(path: Path) -> None:
    config = load_config(path, {"num_layers": 1, "vocab_size": 128})
    assert parameter_count(config).total == sum(built(config).values())
    whole = parameter_count(load_config(path))
    if path.stem == "roformer_coca_authors":
        assert whole.total == 508_880_896, "as transformers' GPT-NeoX counts for the authors' config.json"
    else:
        assert abs(whole.total - 405_334_016) < 0.6e6, "24 layers of the shape of GPT-3's 350M, head untied"


@pytest.mark.parametrize(
    ("shape", "checkpoint"),
    list(
        product(
            (
                *("plain", "untied", "untied, a narrow embedding", "a transform before the head, no first norm"),
                *("grouped", "gated", "parallel", "coca", "gated features", "heads by layer type"),
                *("experts", "experts, a shared MLP", "experts, a gated MLP, biases"),
                *("latents", "latents, gated features, no latent of queries"),
            ),
            (False, True),
        )
    ),
)
def test_operations_are_what_pytorch_counts(shape: str, checkpoint: bool) -> None:
    """With the dense reference: its attention multiplies the full square, as `model` counts it."""
    changes = {"attention_backend": "reference", "vocab_size": 256, "checkpoint_activations": checkpoint}
    changes["loss_chunk_size"] = 0  # the counter does not see the products that write into a given tensor
    config = tiny(**SHAPES[shape] | changes)
    loss, batch, length = LanguageModelLoss(build_model(config)).train(), 2, config.model.seq_length
    with FlopCounterMode(display=False) as counter:
        loss(torch.zeros(batch, length + 1, dtype=torch.int64)).backward()
    unpadded = dict.fromkeys(config.layer_types, "reference")
    counted, flops = counter.get_total_flops() / (batch * length), flops_per_token(config, backends=unpadded)
    shapes = [config.model.with_heads(name) for name in config.model.layer_names]
    widths = sum(shape.num_attention_heads * (shape.score_dim + shape.value_dim) / 2 for shape in shapes)
    squared = 2 * widths * (length - 1)  # the half that is masked
    again = flops.executed - 3 * flops.forward
    assert counted == pytest.approx(flops.model + (again + squared if checkpoint else 0), rel=1e-9)


ADAPTED: dict[str, dict[str, Any]] = {
    "attention": {},
    "all matrices": {"targets": ["query", "key", "value", "dense", "mlp"]},
    "some matrices": {"rank": 3, "targets": ["query", "mlp"]},
    "keys and head as a whole": {"targets": ["query"], "also": ["embedding", "key", "output_head"]},
    "MLP as a whole": {"targets": ["dense"], "also": ["embedding", "mlp", "attention_output"]},
}


def adapted(shape: str, lora: dict[str, Any], **changes: Any) -> tuple[Config, GPT]:
    beside = {"also": ["embedding"], **lora}
    if "output_head" in beside["also"] and not SHAPES[shape].get("no_weight_tying"):
        beside["also"] = [part for part in beside["also"] if part != "output_head"]
    if "attention_output" in beside["also"]:
        beside["targets"] = ["query"]
    config = tiny(**SHAPES[shape] | {"lora": beside} | changes)
    model = build_model(config)
    assert config.optimizer.lora is not None
    add_adapters(model, config.optimizer.lora, 0)
    return config, model


@pytest.mark.parametrize("shape", ["plain", "untied", "grouped", "gated", "heads by layer type"])
@pytest.mark.parametrize("lora", [*ADAPTED.values(), {"dora": True}], ids=[*ADAPTED, "DoRA"])
def test_adapters_are_those_that_peft_adds(shape: str, lora: dict[str, Any]) -> None:
    config, model = adapted(shape, lora)
    sizes = [(name, weight.numel(), weight.requires_grad) for name, weight in model.named_parameters()]
    assert adapter_count(config) == sum(size for name, size, _ in sizes if ".lora_" in name)
    assert trained_count(config).total == sum(size for _, size, trained in sizes if trained)
    assert trainable_share(config).total == sum(size for _, size, _ in sizes)


def counted_operations(config: Config, model: GPT) -> float:
    loss, batch, length = LanguageModelLoss(model).train(), 2, config.model.seq_length
    with FlopCounterMode(display=False) as counter:
        loss(torch.zeros(batch, length + 1, dtype=torch.int64)).backward()
    return counter.get_total_flops() / (batch * length)


DENSE = {"attention_backend": "reference", "vocab_size": 256, "loss_chunk_size": 0}


@pytest.mark.parametrize("shape", ["plain", "untied", "grouped", "gated", "parallel", "coca", "heads by layer type"])
@pytest.mark.parametrize("lora", ADAPTED.values(), ids=ADAPTED)
def test_operations_with_adapters_are_what_pytorch_counts(shape: str, lora: dict[str, Any]) -> None:
    """The embedding is trained, so the gradient passes through all blocks."""
    config, model = adapted(shape, lora, **DENSE)
    assert counted_operations(config, model) == pytest.approx(flops_per_token(config).model, rel=1e-9)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("experts")])
@pytest.mark.parametrize("also", [["embedding"], ["embedding", "mlp"], ["embedding", "router"]])
def test_operations_with_adapters_beside_experts(shape: str, also: list[str]) -> None:
    config, model = adapted(shape, {"also": also}, **DENSE)
    sizes = [(name, weight.numel(), weight.requires_grad) for name, weight in model.named_parameters()]
    assert adapter_count(config) == sum(size for name, size, _ in sizes if ".lora_" in name)
    assert trained_count(config).total == sum(size for _, size, trained in sizes if trained)
    assert counted_operations(config, model) == pytest.approx(flops_per_token(config).model, rel=1e-9)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("latents")])
@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"targets": ["query", "dense"], "dora": True},
        {"targets": ["key", "value", "mlp"], "also": ["query", "embedding"]},
    ],
    ids=["attention", "DoRA of queries", "queries as a whole"],
)
def test_adapters_of_latent_attention(shape: str, lora: dict[str, Any]) -> None:
    """One matrix computes keys and values, so both have the same adapters."""
    test_adapters_are_those_that_peft_adds(shape, lora)
    if "dora" not in lora:
        test_operations_with_adapters_are_what_pytorch_counts(shape, lora)


@pytest.mark.parametrize("shape", ["plain", "untied", "grouped", "coca", "gated heads", "experts, a shared MLP"])
@pytest.mark.parametrize("parts", [["key"], ["query", "key", "value"], ["mlp"], ["attention_output"]])
def test_operations_of_a_stage_that_trains_a_part(shape: str, parts: list[str]) -> None:
    routers = ["router"] if parts == ["mlp"] and shape.startswith("experts") else []
    config = tiny(**SHAPES[shape] | DENSE | {"trainable": [*parts, *routers, "embedding"]})
    model = build_model(config)
    train_only_parts(model, config.optimizer)
    assert counted_operations(config, model) == pytest.approx(flops_per_token(config).model, rel=1e-9)


def test_causal_kernels_do_half_of_the_square() -> None:
    config = tiny()
    flops = flops_per_token(config)
    square = 12 * config.model.num_layers * config.model.hidden_size * 32
    assert flops.model - flops.executed == pytest.approx(square * (1 - 33 / 64))


def test_length_changes_attention_alone() -> None:
    config = tiny()
    short, long = flops_per_token(config, 10), flops_per_token(config, 110)
    assert long.model - short.model == 12 * config.model.num_layers * config.model.hidden_size * 100


def test_an_unknown_vocabulary_is_named() -> None:
    config = load_config([], {name: value for name, value in TINY.items() if name != "vocab_size"})
    with pytest.raises(ConfigError, match="vocab_size"):
        parameter_count(config)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H20-3e", 148e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA B200", 2250e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA L40S", 362e12),
        ("cpu", None),
        ("NVIDIA TITAN V", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
