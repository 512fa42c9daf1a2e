"""Gradients that are sums over tokens, in half precision on the CPU: against float64 and a plain run that upcasts."""

from copy import deepcopy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from megatron_coca.config import load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.model.layers import LayerNorm, LearnedPositions, RowEmbedding, build_norm, qk_norms

TOKENS, WIDTH, ROWS = 4096, 64, 40
HALF = [torch.bfloat16, torch.float16]
SHAPE = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 8}


def error(found: Tensor | None, exact: Tensor) -> float:
    assert found is not None
    return float((found.double() - exact).norm() / exact.norm())


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states, and a gradient with a mean: its sum grows and loses the terms that are added."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))
    return x.to(dtype), (1e-3 * (gradient + 0.3)).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_sums_in_float32(dtype: torch.dtype, bias: bool) -> None:
    x, gradient = inputs(dtype)
    norm = LayerNorm(WIDTH, bias=bias).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.linspace(-0.5, 0.5, WIDTH))

    def gradients(wide: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().clone().requires_grad_() for each in (x, *norm.parameters())]
        given = [each.to(wide) for each in leaves] + [None] * (not bias)
        F.layer_norm(given[0], (WIDTH,), *given[1:], norm.eps).to(dtype).backward(gradient)
        return [each.grad for each in leaves]  # type: ignore[misc]

    exact = [x.double().requires_grad_(), *(each.detach().double().requires_grad_() for each in norm.parameters())]
    F.layer_norm(exact[0], (WIDTH,), *exact[1:], *[None] * (not bias), norm.eps).backward(gradient.double())
    x.requires_grad_()
    out = norm(x)
    out.backward(gradient)
    assert torch.equal(out, nn.LayerNorm.forward(norm, x)), "the forward pass is PyTorch's"
    for found, upcast, truth in zip((x, *norm.parameters()), gradients(torch.float32), exact, strict=True):
        assert truth.grad is not None
        assert error(found.grad, truth.grad) <= 2 * error(upcast, truth.grad)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", [RowEmbedding, LearnedPositions])
def test_rows_of_an_embedding_sum_in_float32(dtype: torch.dtype, kind: type[nn.Embedding]) -> None:
    """Frequent tokens: some rows are read a thousand times."""
    gradient = inputs(dtype)[1].view(4, -1, WIDTH)
    ids = (ROWS * torch.rand(gradient.shape[:2], generator=torch.Generator().manual_seed(1)) ** 3).long()
    table = kind(ROWS, WIDTH).to(dtype)
    nn.init.normal_(table.weight)
    out = table(ids)
    out.backward(gradient)
    assert torch.equal(out, F.embedding(ids, table.weight))
    exact, upcast = (
        torch.zeros(ROWS, WIDTH, dtype=wide).index_add_(0, ids.flatten(), gradient.flatten(0, 1).to(wide))
        for wide in (torch.float64, torch.float32)
    )
    assert error(table.weight.grad, exact) <= 2 * error(upcast.to(dtype), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_are_left_to_pytorch(dtype: torch.dtype) -> None:
    x, gradient = inputs(dtype)
    norm, plain = LayerNorm(WIDTH).to(dtype), nn.LayerNorm(WIDTH).to(dtype)
    for each in (norm, plain):
        each(x).backward(gradient)
    assert torch.equal(norm.weight.grad, plain.weight.grad) and torch.equal(norm.bias.grad, plain.bias.grad)
    assert "SummedLayerNorm" not in type(norm(x).grad_fn).__name__


def test_a_frozen_part_has_no_gradient() -> None:
    x, gradient = inputs(torch.bfloat16)
    norm = LayerNorm(WIDTH).bfloat16()
    norm.bias.requires_grad_(False)
    norm(x).backward(gradient)
    assert norm.bias.grad is None and norm.weight.grad is not None
    norm.weight.requires_grad_(False)
    assert not norm(x).requires_grad


KEYS = [{}, {"use_qk_layernorm": True}, {"qk_norm": "head"}]
NORMS = [(norm, keys) for norm in ("layernorm", "rmsnorm", "scalenorm") for keys in KEYS]


@pytest.mark.parametrize(("norm", "keys"), [*NORMS, ("rmsnorm", {"zero_centered_norms": True})])
def test_every_configured_norm_is_as_exact_as_a_plain_one(norm: str, keys: dict[str, bool | str]) -> None:
    """The plain one computes in float32 from the same rounded arguments, and rounds each gradient once; a gradient that
    is one number may have no error there by luck, so half a unit in the last place is allowed besides.
    """
    model = load_config([], SHAPE | {"norm": norm} | keys).model
    x, gradient = inputs(torch.bfloat16)
    module = next(iter(qk_norms(model).values()), None)
    module = build_norm(model) if module is None else module
    if keys.keys() & {"use_qk_layernorm", "qk_norm"}:
        x, gradient = (each.view(TOKENS, 4, -1) for each in (x, gradient))
    found, upcast, exact = (
        deepcopy(module).bfloat16(),
        *(deepcopy(module).to(wide) for wide in (torch.float32, torch.float64)),
    )
    found(x).backward(gradient)
    upcast(x.float()).backward(gradient.float())
    exact(x.double()).backward(gradient.double())
    for each, plain, truth in zip(found.parameters(), upcast.parameters(), exact.parameters(), strict=True):
        assert truth.grad is not None and plain.grad is not None
        assert error(each.grad, truth.grad) <= 2 * error(plain.grad.bfloat16(), truth.grad) + 2**-9


GATED = [{"forgetting_gate": "fox"}, {"forgetting_gate": "cable", "pos_emb": "coca"}]


@pytest.mark.parametrize("keys", GATED)
def test_gates_of_a_model_are_as_exact_as_a_dense_one(keys: dict[str, str]) -> None:
    """Sums over keys in which most cancels: a kernel's rounding of each was 20% of the gradient of a gate's bias,
    and 1% with the reference backend.
    """
    shape = SHAPE | {"num_layers": 2, "seq_length": 300, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    torch.manual_seed(0)
    model = build_model(load_config([], shape | keys)).bfloat16()
    dense = build_model(load_config([], shape | keys | {"attention_backend": "reference"})).bfloat16()
    dense.load_state_dict(model.state_dict())
    exact, samples = deepcopy(model).double(), torch.randint(8, (4, 301))
    for each in (model, dense, exact):
        LanguageModelLoss(each)(samples).backward()
    for (name, found), plain, truth in zip(
        model.named_parameters(), dense.parameters(), exact.parameters(), strict=True
    ):
        if "position_gates" in name:
            assert truth.grad is not None
            assert error(found.grad, truth.grad) <= 2 * error(plain.grad, truth.grad) + 2**-8, name
