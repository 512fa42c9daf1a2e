"""The operand kernels on CUDA: every form, features after the rotary block, and other head sizes.

Run with: python -m pytest -m gpu
"""

import pytest
import torch

from tests.parity.operand_cases import POLAR, check, check_polar
from tests.parity.triton_cases import Case
from tests.parity.triton_cases import check as check_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FORMS = ("rotary", "coca", "coca_strict")
SIZES = [(16, 64), (64, 64), (20, 80), (40, 80), (24, 96), (32, 128), (128, 128), (64, 256), (6, 16), (12, 40)]
"""Rotated features and head_dim: whole and partial rotation, powers of two and other sizes."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rotated", "head_dim"), SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_operands_and_their_gradients(form: str, rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    """Lengths are odd, and every second size has tables for each row."""
    check(form, rotated, head_dim, head_dim % 32 == 16, dtype, "cuda", 317)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rotated", "head_dim"), SIZES[::3])
@pytest.mark.parametrize("case", POLAR, ids=str)
def test_polar_operands(case: tuple[str, int, int, bool], rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every magnitude, power and number of frequencies, without and with constant angles."""
    check_polar(case, rotated, head_dim, head_dim % 32 == 16, dtype, "cuda", 317)


@pytest.mark.parametrize("form", FORMS)
def test_one_token(form: str) -> None:
    """A decoded token."""
    check(form, 16, 64, False, torch.bfloat16, "cuda", 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_million_tokens(form: str) -> None:
    """More row blocks than 65,535; the last rows are those of a short input."""
    from megatron_coca.kernels.operands import fused_operands  # triton exists only on some platforms

    length, rotated = 1 << 20, 32
    q = torch.randn(1, 1, length, 128, device="cuda").bfloat16()
    tables = [torch.randn(length, rotated // 2, device="cuda") for _ in range(4)]
    whole = fused_operands(q, q, tables, form)  # type: ignore[arg-type]
    end = [table[-99:] for table in tables]
    short = fused_operands(q[:, :, -99:], q[:, :, -99:], end, form)  # type: ignore[arg-type]
    assert all(torch.equal(one[:, :, -99:], other) for one, other in zip(whole, short, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [40, 48, 96, 112, 160, 192])
def test_attention_with_other_head_sizes(head_dim: int, dtype: torch.dtype) -> None:
    """Our kernels pad such heads to a power of two."""
    check_attention(Case(777, heads=4, kv_heads=2, head_dim=head_dim), dtype, "cuda")
