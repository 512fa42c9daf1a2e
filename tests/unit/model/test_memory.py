"""Activations from the configuration, against the tensors that autograd saves."""

from typing import Any

import pytest
import torch

from megatron_coca.config import Config, load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.model.cost import BYTES, activations, loss_bytes
from megatron_coca.training.adapters import add_adapters

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 128,
    "vocab_size": 128,
    "no_weight_tying": True,
    "pos_emb": "rotary",
}
MICRO = 2
TOLERANCE = 0.25


def configured(**changes: Any) -> Config:
    return load_config([], BASE | changes)


def saved_bytes(config: Config) -> int:
    """The storages that autograd keeps between forward and backward pass, parameters not counted."""
    model = build_model(config)
    if config.optimizer.lora is not None:
        add_adapters(model, config.optimizer.lora, 0)
    loss = LanguageModelLoss(model).train()
    loss = loss.to({"fp32": torch.float32, "bf16": torch.bfloat16}[config.precision.dtype])
    own = {parameter.untyped_storage().data_ptr() for parameter in loss.parameters()}
    found: dict[int, int] = {}
    held = []  # the address of a freed tensor could be used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(torch.zeros(MICRO, config.model.seq_length + 1, dtype=torch.int64))
    return sum(size for place, size in found.items() if place not in own)


def kept_by_loss(config: Config) -> int:
    """The loss in chunks keeps the gradients of the hidden states and, in float32, of the output head."""
    hidden = config.model.hidden_size
    size = BYTES[config.precision.dtype]
    head = config.model.padded_vocab_size * hidden * 4 * config.optimizer.trains("output_head")
    return MICRO * config.model.seq_length * hidden * size + head


SHAPES: dict[str, dict[str, Any]] = {
    "rotary": {},
    "coca": {"pos_emb": "coca"},
    "coca, half": {"pos_emb": "coca", "rotary_pct": 0.5},
    "coca_strict": {"pos_emb": "coca_strict"},
    "xpos": {"pos_emb": "xpos"},
    "pope": {"pos_emb": "pope"},
    "pope without offsets": {"pos_emb": "pope", "pos_emb_options": {"offset": "none"}},
    "pope in bfloat16": {"precision": "bfloat16", "pos_emb": "pope"},
    "alibi": {"pos_emb": "alibi"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "learned": {"pos_emb": "learned"},
    "none": {"pos_emb": "none"},
    "grouped": {"num_kv_heads": 1},
    "gated": {"activation": "swiglu"},
    "relu": {"activation": "relu"},
    "experts": {"moe_num_experts": 4, "moe_top_k": 2, "activation": "swiglu", "moe_intermediate_size": 64},
    "experts in bfloat16": {
        "precision": "bfloat16",
        "mlp_config": ["dense", "experts", "experts", "experts"],
        "moe_num_experts": 4,
        "moe_shared_intermediate_size": 64,
        "moe_shared_gate": True,
    },
    "experts with clamped products": {"moe_num_experts": 4, "moe_top_k": 2, "activation": "clamped_swiglu"},
    "latents": {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16},
    "latents, coca": {"pos_emb": "coca", "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 24},
    "latents in bfloat16": {"precision": "bfloat16", "kv_lora_rank": 32, "q_lora_rank": 48, "pos_emb": "none"},
    "parallel": {"gpt_j_residual": True},
    "gated heads": {"attention_output_gate": "head"},
    "gated features": {"attention_output_gate": "feature", "num_kv_heads": 1},
    "parallel, one norm": {"gpt_j_residual": True, "gpt_j_tied": True},
    "rmsnorm": {"norm": "rmsnorm"},
    "dropout": {"hidden_dropout": 0.1},
    "long and narrow": {"seq_length": 512, "hidden_size": 64},
    "bfloat16": {"precision": "bfloat16"},
    "coca in bfloat16": {"precision": "bfloat16", "pos_emb": "coca"},
    "rmsnorm in bfloat16": {"precision": "bfloat16", "norm": "rmsnorm"},
    "gated in bfloat16": {"precision": "bfloat16", "activation": "swiglu", "num_kv_heads": 2},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_activations_are_what_autograd_saves(shape: dict[str, Any]) -> None:
    config = configured(**shape)
    kept, _, ends = activations(config, MICRO)
    assert kept * config.model.num_layers + ends + kept_by_loss(config) == pytest.approx(
        saved_bytes(config), rel=TOLERANCE
    )


BESIDE = ["norms", "embedding"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"rank": 8, "also": BESIDE},
    "all matrices": {"targets": ["query", "key", "value", "dense", "mlp"], "also": [*BESIDE, "output_head"]},
    "dropout": {"rank": 8, "dropout": 0.1, "also": BESIDE},
    "output projection": {"rank": 8, "targets": ["dense"], "also": BESIDE},
    "queries as a whole": {"rank": 8, "targets": ["value"], "also": ["query", *BESIDE]},
    "DoRA": {"rank": 8, "dora": True, "also": BESIDE},
}


@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize(
    "shape",
    ["rotary", "coca", "pope", "alibi", "grouped", "parallel, one norm", "gated in bfloat16", "rmsnorm in bfloat16"],
)
def test_activations_with_adapters_are_what_autograd_saves(shape: str, lora: dict[str, Any]) -> None:
    """DoRA frees an identity matrix for each adapter at once, which the hook counts all the same."""
    check_adapters(shape, lora, TOLERANCE if lora.get("dora") else 0.12)


def check_adapters(shape: str, lora: dict[str, Any], tolerance: float) -> None:
    config = configured(**SHAPES[shape] | {"lora": lora})
    kept, _, ends = activations(config, MICRO)
    assert kept * config.model.num_layers + ends + kept_by_loss(config) == pytest.approx(
        saved_bytes(config), rel=tolerance
    )


@pytest.mark.parametrize("lora", [each for each in ADAPTERS if each != "queries as a whole"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("latents")])
def test_activations_with_adapters_of_latents(shape: str, lora: str) -> None:
    check_adapters(shape, ADAPTERS[lora], 0.15)


@pytest.mark.parametrize("also", [[], ["mlp"], ["router"], ["mlp", "router"]], ids=lambda parts: " ".join(parts))
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.startswith("experts")])
def test_activations_with_adapters_beside_experts(shape: str, also: list[str]) -> None:
    test_activations_with_adapters_are_what_autograd_saves(shape, {"rank": 8, "also": [*BESIDE, *also]})


@pytest.mark.parametrize("pos_emb", ["rotary", "pope"])
def test_activations_with_triton_are_what_autograd_saves(pos_emb: str) -> None:
    """Its kernels compute the operands of polar forms from magnitudes, and their output needs no copy."""
    pytest.importorskip("triton")
    config = configured(num_layers=1, seq_length=64, pos_emb=pos_emb, attention_backend="triton")
    kept, _, ends = activations(config, MICRO, backends={"global": "triton"})
    assert kept + ends + kept_by_loss(config) == pytest.approx(saved_bytes(config), rel=0.1)
    assert kept < activations(config, MICRO).kept


@pytest.mark.parametrize("group", [1, 2])
def test_checkpointing_keeps_the_inputs_of_groups(group: int) -> None:
    config = configured(checkpoint_activations=True, checkpoint_num_layers=group)
    kept, working, ends = activations(config, MICRO)
    hidden = MICRO * config.model.seq_length * config.model.hidden_size * BYTES["fp32"]
    assert kept * group == hidden
    assert working == pytest.approx(group * activations(configured(), MICRO).kept)
    assert kept * config.model.num_layers + ends + kept_by_loss(config) == pytest.approx(
        saved_bytes(config), rel=TOLERANCE
    )


def test_selective_lies_between() -> None:
    kept = {
        policy: activations(configured(checkpoint_activations=True, checkpoint_policy=policy), MICRO).kept
        for policy in ("full", "selective")
    }
    assert kept["full"] < kept["selective"] < activations(configured(), MICRO).kept


def test_ranks_share_activations() -> None:
    whole = activations(configured(), MICRO)
    assert activations(configured(), MICRO, sequence=2).kept == whole.kept / 2
    shared = activations(configured(), MICRO, tensor=2).kept
    assert whole.kept / 2 < shared < whole.kept, "the residual stream is whole on every tensor rank"


def test_a_chunked_loss_does_not_grow_with_the_tokens() -> None:
    large = {"vocab_size": 50304, "hidden_size": 64}
    chunked = [loss_bytes(configured(**large, loss_chunk_size=256), micro) for micro in (2, 32)]
    whole = [loss_bytes(configured(**large, loss_chunk_size=10**6), micro) for micro in (2, 32)]
    assert chunked[1] < 1.05 * chunked[0] and chunked[1] < whole[1] / 7
    assert whole[1] - whole[0] == 15 * 256 * (50304 * 8 + 64 * 4)
