"""The cases of the GPU tests of the head and the operands, in float32 in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu import test_head_cuda, test_operands_cuda
from tests.parity import loss_cases, operand_cases

SMALL_HEAD = [case for case in test_head_cuda.CASES if case.tokens * case.words <= 20_000]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in SMALL_HEAD else pytest.mark.slow, id=str(case))
        for case in test_head_cuda.CASES
    ],
)
def test_head(case: loss_cases.HeadCase) -> None:
    loss_cases.check(case, torch.float32, DEVICE)


def test_products_are_summed_in_float32() -> None:
    loss_cases.check_sum(torch.bfloat16, DEVICE, "torch", chunk=4)


@pytest.mark.parametrize(
    ("form", "rotated", "head_dim"),
    [
        pytest.param(form, *size, marks=[] if form == "coca" and size in ((24, 96), (12, 40)) else pytest.mark.slow)
        for form in test_operands_cuda.FORMS
        for size in test_operands_cuda.SIZES
    ],
)
def test_operands(form: str, rotated: int, head_dim: int) -> None:
    operand_cases.check(form, rotated, head_dim, head_dim % 32 == 16, torch.float32, DEVICE, 37)
