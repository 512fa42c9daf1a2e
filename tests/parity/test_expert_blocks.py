"""Mixtures of experts beside the blocks of transformers: values and gradients in float64, with odd sizes."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megatron_coca.config import load_config
from megatron_coca.model import experts
from megatron_coca.model.experts import ExpertMixture
from tests.parity.families.test_families import in_float64

WIDTH, INNER, TOKENS = 14, 10, (3, 13)
CASES: dict[str, tuple[type, str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (
        MixtralSparseMoeBlock,
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": INNER},
        {"moe_num_experts": 5, "moe_top_k": 2, "moe_norm_topk_prob": True},
    ),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock,
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": INNER, "norm_topk_prob": False},
        {"moe_num_experts": 7, "moe_top_k": 3},
    ),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        "Qwen2Moe",
        {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": INNER, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 6},
        {"moe_num_experts": 4, "moe_top_k": 1, "moe_shared_intermediate_size": 6, "moe_shared_gate": True},
    ),
    "glm4_moe": (
        Glm4MoeMoE,
        "Glm4Moe",
        {"n_routed_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": INNER, "n_group": 3}
        | {"topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 2, "norm_topk_prob": True},
        {"moe_num_experts": 9, "moe_top_k": 4, "moe_num_groups": 3, "moe_top_k_groups": 2, "moe_norm_topk_prob": True}
        | {"moe_router_scores": "sigmoid", "moe_correction_bias": True, "moe_routed_scaling_factor": 1.7}
        | {"moe_shared_intermediate_size": 2 * INNER},
    ),
    "deepseek_v2": (
        DeepseekV2Moe,
        "DeepseekV2",
        {"n_routed_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": INNER, "n_group": 3}
        | {"topk_group": 2, "routed_scaling_factor": 1.7, "n_shared_experts": 1, "topk_method": "group_limited_greedy"}
        | {"num_attention_heads": 2},
        {"moe_num_experts": 9, "moe_top_k": 4, "moe_num_groups": 3, "moe_top_k_groups": 2, "moe_group_scores": "max"}
        | {"moe_routed_scaling_factor": 1.7, "moe_shared_intermediate_size": INNER},
    ),
    "llama4_text": (
        Llama4TextMoe,
        "Llama4Text",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": INNER},
        {"moe_num_experts": 5, "moe_top_k": 2, "moe_router_scores": "sigmoid", "moe_weights_on_input": True}
        | {"moe_shared_intermediate_size": INNER},
    ),
    "gpt_oss": (
        GptOssMLP,
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": INNER, "swiglu_limit": 0.6},
        {"moe_num_experts": 6, "moe_top_k": 3, "moe_norm_topk_prob": True, "moe_router_bias": True}
        | {"activation": "clamped_swiglu", "swiglu_limit": 0.6, "use_bias_in_mlp": True},
    ),
}


def build(name: str, width: int = WIDTH, **inner: int) -> tuple[Any, ExpertMixture]:
    """The block of transformers with random weights, and our module with the same ones. Both in float64."""
    block, config, theirs, ours = CASES[name]
    torch.manual_seed(3)
    theirs, ours = theirs | {key: inner["inner"] for key in theirs if inner and "intermediate" in key}, dict(ours)
    reference = block(getattr(transformers, f"{config}Config")(hidden_size=width, **theirs)).double()
    with torch.no_grad():
        for weight in (*reference.parameters(), *reference.buffers()):
            weight.copy_(0.5 * torch.randn(weight.shape))
    keys = {"num_layers": 1, "hidden_size": width, "num_attention_heads": 1, "seq_length": 8, "vocab_size": 9}
    keys |= {"activation": "swiglu", "use_bias_in_mlp": False, "moe_intermediate_size": inner.get("inner", INNER)}
    keys |= ours
    found = ExpertMixture(load_config([], keys).model).double()
    with torch.no_grad():
        for key, value in translated(name, reference.state_dict()).items():
            found.get_parameter(key).copy_(value)
    return reference, found


def translated(name: str, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights, or their gradients, from those of the block."""

    def turned(packed: Tensor) -> Tensor:
        return torch.cat(packed.chunk(2, 1)[::-1], 1)  # gate before value -> value before gate

    if name == "gpt_oss":
        packed, bias = theirs["experts.gate_up_proj"].mT, theirs["experts.gate_up_proj_bias"]
        return {
            "linear1.weight": torch.cat((packed[:, 1::2], packed[:, ::2]), 1),
            "linear1.bias": torch.cat((bias[:, 1::2], bias[:, ::2]), 1),
            "linear2.weight": theirs["experts.down_proj"].mT,
            "linear2.bias": theirs["experts.down_proj_bias"],
            "router.weight": theirs["router.weight"],
            "router.bias": theirs["router.bias"],
        }
    first, second = theirs["experts.gate_up_proj"], theirs["experts.down_proj"]
    if name == "llama4_text":
        first, second = first.mT, second.mT
    found = {"linear1.weight": turned(first), "linear2.weight": second}
    found["router.weight"] = theirs["router.weight" if name == "llama4_text" else "gate.weight"]
    if "gate.e_score_correction_bias" in theirs:
        found["router.correction_bias"] = theirs["gate.e_score_correction_bias"]
    for shared in ("shared_expert", "shared_experts"):
        if f"{shared}.up_proj.weight" in theirs:
            parts = [theirs[f"{shared}.{part}_proj.weight"] for part in ("up", "gate")]
            found |= {"shared.linear1.weight": torch.cat(parts)}
            found |= {"shared.linear2.weight": theirs[f"{shared}.down_proj.weight"]}
    if "shared_expert_gate.weight" in theirs:
        found["shared_gate.weight"] = theirs["shared_expert_gate.weight"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_transformers(name: str) -> None:
    x = torch.randn(*TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given, own = x.clone().requires_grad_(), x.clone().requires_grad_()
    seed = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with in_float64():
        reference, found = build(name)
        expected = reference(given)
        expected = (expected[0] if isinstance(expected, tuple) else expected).view(x.shape)
        expected.backward(seed)
    result = found(own)
    result.backward(seed)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(own.grad, given.grad, rtol=1e-11, atol=1e-11)
    gradients = {key: weight.grad for key, weight in reference.named_parameters() if weight.grad is not None}
    for key, gradient in translated(name, gradients).items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(found.get_parameter(key).grad, gradient, rtol=1e-11, atol=1e-11)
    trained = {key for key, weight in found.named_parameters() if weight.requires_grad}
    assert trained == translated(name, gradients).keys()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_one_grouped_product_computes_what_the_loop_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, which the grouped product of a GPU has: results have 8 bits, and the sums of gradients as many."""
    mixture = build(name, 24, inner=16)[1].bfloat16()
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(experts, "can_group", lambda x, weight, grouped=grouped: grouped)
        mixture.zero_grad()
        own = x.clone().requires_grad_()
        out = mixture(own)
        out.sum().backward()
        results.append([out, own.grad, *(weight.grad for weight in mixture.parameters() if weight.requires_grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
