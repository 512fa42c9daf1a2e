"""The backends that CUDA models get, against the float64 oracle. Run with: python -m pytest -m gpu"""

import pytest
import torch
from torch import Tensor

from megatron_coca.attention import oracle
from megatron_coca.attention.backends.select import select_backend
from megatron_coca.attention.inputs import Needs
from megatron_coca.attention.method import build_method
from megatron_coca.config import load_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS, HEAD_DIM = 4, 64


def run(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = {"num_layers": 1, "hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "seq_length": 512}
    config = load_config([], keys | {"pos_emb": name})
    method = build_method(config.position, config.model)
    _, backend = select_backend("auto", Needs("cuda", method.bias is not None, 0.0))
    length = q.shape[2]
    tables = method.tables(torch.arange(length, device=q.device), length, q.dtype)
    return backend.attend(method.prepare(q, k, v, tables))


@pytest.mark.parametrize("length", [128, 1000])
@pytest.mark.parametrize("name", ["rotary", "coca", "coca_strict", "alibi", "none"])
def test_bfloat16_values_and_gradients(name: str, length: int) -> None:
    """Within the rounding of bfloat16 operands of the exact result."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(2, HEADS, length, HEAD_DIM, generator=generator).bfloat16() for _ in range(3)]
    theta = oracle.frequencies(HEAD_DIM)
    exact_leaves = [x.double().requires_grad_() for x in operands]
    exact = oracle.attention(name, *exact_leaves, theta)
    leaves = [x.cuda().requires_grad_() for x in operands]
    out = run(name, *leaves)
    cotangent = torch.randn(out.shape, generator=generator)
    grads = torch.autograd.grad(out, leaves, cotangent.cuda().to(out.dtype))
    exact_grads = torch.autograd.grad(exact, exact_leaves, cotangent.double())
    for got, expected in zip((out, *grads), (exact, *exact_grads), strict=True):
        error = (got.detach().double().cpu() - expected.detach()).norm() / expected.detach().norm()
        assert error < 0.02, "bfloat16 keeps 8 bits: an error of 2% is a wrong formula, not rounding"
