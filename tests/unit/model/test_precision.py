"""Precision: dense scores are as exact as the kernels', caps are rounded once, and float64 models stay in float64."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import SdpaBackend
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Segment
from megatron_coca.attention.positions.bias import FireBias, LearnedFire, bias_of_pairs
from megatron_coca.config import load_config
from megatron_coca.methods import names
from megatron_coca.model import build_model
from megatron_coca.model.gpt import LanguageModelLoss
from megatron_coca.model.layers import SinusoidalPositions, soft_capped
from megatron_coca.model.loss import linear_cross_entropy

HALF = (torch.bfloat16, torch.float16)
SHAPES = ((1, 2, 2, 64, 64, 16), (2, 4, 2, 270, 270, 32), (1, 4, 1, 3, 65, 24), (1, 2, 2, 1, 300, 64))
"""batch, heads, key heads, queries, keys, features."""


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a cotangent, float64 of values that `dtype` holds."""
    batch, heads, kv_heads, rows, keys, features = shape
    generator = torch.Generator().manual_seed(keys)
    sizes = [(heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows)]
    drawn = [torch.randn(batch, *size, features, generator=generator, dtype=torch.float64) for size in sizes]
    return [x.to(dtype).double() for x in (2 * drawn[0], *drawn[1:])]


def with_gradients(attend: Any, operands: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of q, k and v, in float64."""
    *leaves, cotangent = (x.to(dtype).clone().requires_grad_() for x in operands)
    out = attend(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, cotangent))]


def exact(q: Tensor, k: Tensor, v: Tensor, cap: float | None, bias: FireBias | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    place = torch.arange(k.shape[2])
    query = place[-q.shape[2] :, None]
    if bias is not None:
        scores = scores + bias_of_pairs(bias, (query - place).clamp(min=0).to(q.dtype), query)
    return scores.masked_fill(query < place, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("backend", [SdpaBackend(), ReferenceBackend()], ids=["sdpa", "reference"])
@pytest.mark.parametrize(("cap", "fire"), [(50.0, False), (3.0, False), (None, True), (30.0, True)])
def test_dense_scores_are_as_exact_as_a_kernel(cap: float | None, fire: bool, backend: Any, dtype: torch.dtype) -> None:
    """Soft-capping and FIRE in half precision, against PyTorch's kernel without them; values and gradients."""
    for shape in SHAPES:
        operands = drawn(shape, dtype)
        torch.manual_seed(0)
        bias = LearnedFire(shape[1]).double().distance_bias() if fire else None
        true = with_gradients(lambda q, k, v, bias=bias: exact(q, k, v, cap, bias), operands, torch.float64)
        ours = with_gradients(
            lambda q, k, v, bias=bias: backend.attend(
                AttentionInputs((Segment(q, k, CAUSAL),), v, q.shape[-1] ** -0.5, bias=bias, softcap=cap)
            ),
            operands,
            dtype,
        )
        simple = with_gradients(lambda q, k, v: exact(q, k, v, None, None), operands, torch.float64)
        rows, keys = shape[3:5]
        mask = None if rows == keys else torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        kernel = with_gradients(
            lambda q, k, v, mask=mask: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            ),
            operands,
            dtype,
        )
        for name, off, found, at, known in zip(("out", "q", "k", "v"), ours, true, kernel, simple, strict=True):
            limit = 2 * (at - known).norm() / known.norm()
            assert (off - found).norm() / found.norm() < limit, (name, shape)


@pytest.mark.parametrize("dtype", HALF)
def test_capped_logits_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(dtype) for n in (40, 90))
    logits, labels = hidden @ weight.T, torch.arange(40)
    assert torch.equal(soft_capped(logits, 5.0), (5 * torch.tanh(logits.float() / 5)).to(dtype))

    leaf = logits.double().requires_grad_()
    F.cross_entropy(5 * torch.tanh(leaf / 5), labels).backward()
    states = hidden.clone().requires_grad_()
    linear_cross_entropy(states, weight, labels, 16, "torch", 5.0).backward()
    wanted = leaf.grad @ weight.double()
    assert (states.grad - wanted).norm() / wanted.norm() < torch.finfo(dtype).eps


SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24, "vocab_size": 50}
SHAPE |= {"make_vocab_size_divisible_by": 1, "pos_emb": "coca"}
DOUBLE: dict[str, dict[str, Any]] = {
    **{name: {"pos_emb": name} for name in ("rotary", "coca", "xpos", "sinusoidal")},
    **{name: {"pos_emb": name} for name in names("pos_emb", biased=True, compute=None)},
    **{name: {"forgetting_gate": name} for name in ("fox", "cable")},
    "ssmax": {"logit_scaling": {"type": "ssmax", "bias": True}},
    "temperature": {"logit_scaling": {"type": "temperature", "period": 4}, "rotary_pct": 0.5},
    "sinks": {"sink_logits": True},
    "output gates": {"attention_output_gate": "feature"},
    "rope_id": {"rotary_frequencies": "rope_id", "rotary_pct": 0.5},
    "clex": {"rope_scaling": {"rope_type": "clex", "original_max_position_embeddings": 8}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "scalenorm": {"norm": "scalenorm", "use_qk_layernorm": True},
    "rmsnorm": {"norm": "rmsnorm", "qk_norm": "head", "zero_centered_norms": True},
    "caps": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "loss_chunk_size": 8},
    "gau": {"attention_config": [[["gau"], "all"]], "gau_key_width": 16},
}


@pytest.mark.parametrize("keys", DOUBLE.values(), ids=DOUBLE)
def test_float64_models_stay_in_float64(keys: dict[str, Any]) -> None:
    """A difference quotient of the loss agrees with the gradient to 1e-6: a number rounded to float32 on the way, such
    as a learned bias, moves in steps of 6e-8, which is 6e-2 of these differences.
    """
    torch.manual_seed(0)
    model = build_model(load_config([], SHAPE | keys)).double().eval()
    loss, samples = LanguageModelLoss(model), torch.randint(50, (2, 25))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for weight in named.values():
            weight.add_(0.1 * torch.randn_like(weight))
    learned = [weight for name, weight in named.items() if "position" in name] or list(named.values())
    learned = [weight for weight in learned if weight.requires_grad]
    ways = [torch.randn_like(weight) for weight in learned]
    slope = sum((g * way).sum() for g, way in zip(torch.autograd.grad(loss(samples), learned), ways, strict=True))

    def moved(step: float) -> Tensor:
        with torch.no_grad():
            for weight, way in zip(learned, ways, strict=True):
                weight.add_(way, alpha=step)
            value = loss(samples)
            for weight, way in zip(learned, ways, strict=True):
                weight.sub_(way, alpha=step)
        return value

    step = 1e-6
    quotient = (moved(step) - moved(-step)) / (2 * step)
    assert abs(quotient - slope) < 1e-6 * abs(slope), (float(quotient), float(slope))


def test_sines_are_of_the_precision_of_the_embedding() -> None:
    found = SinusoidalPositions(6)(torch.tensor([1000]))[0].numpy()
    phases = 1000.0 * 10000.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(found, np.concatenate((np.sin(phases), np.cos(phases))), rtol=0, atol=1e-12)
