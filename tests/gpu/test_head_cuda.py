"""The output layer with its loss, as it runs by default on CUDA: the loss kernel's gradient, and matrix products of
half-precision matrices that are added in float32 (`mm` and `addmm` with `out_dtype`).

Run with: python -m pytest -m gpu
"""

import pytest
import torch

from megatron_coca.model.loss import IGNORED, linear_cross_entropy
from tests.parity.loss_cases import HeadCase, check, check_sum

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
CASES = [
    HeadCase(1000, 64, 50304, 256),  # the padded vocabulary of GPT-2, and a last chunk that is not full
    HeadCase(1000, 64, 50257, 256),  # an odd vocabulary, with rows at odd addresses
    HeadCase(513, 80, 4097, 512, factor=1 / 3),
    HeadCase(37, 1024, 130, 1, factor=1024.0),
    HeadCase(300, 96, 3, 128, ignored=False),
    HeadCase(2, 128, 32000, 1024, ignored=False),
]


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", ["triton", "torch"])
def test_values_and_gradients(case: HeadCase, kernel: str, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda", kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_summed_in_float32(dtype: torch.dtype) -> None:
    check_sum(dtype, "cuda", "triton")


@DTYPES
def test_no_label_counts(dtype: torch.dtype) -> None:
    hidden = torch.randn(70, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(130, 64, device="cuda", dtype=dtype, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((70,), IGNORED, device="cuda"), 16, "triton")
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not loss.any() and not hidden.grad.any() and not weight.grad.any()
