"""The compiled Triton kernels. Run with: python -m pytest -m gpu"""

import pytest
import torch

from tests.parity.triton_cases import Case, check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    *(Case(length, heads=4, kv_heads=2, head_dim=64) for length in (1, 63, 1000, 4096)),
    *(Case(1000, heads=4, kv_heads=4, head_dim=head_dim) for head_dim in (16, 32, 64, 80, 128, 256)),
    *(Case(1000, window=window, far=far, head_dim=64) for window in (1, 100, 256) for far in (False, True)),
    *(Case(1000, formula=formula, head_dim=64) for formula in ("linear", "log", "power")),
    *(Case(1000, window=256, far=True, head_dim=head_dim) for head_dim in (16, 128, 256)),
    Case(4096, window=1024, far=True, head_dim=64),
    Case(4096, window=1024, far=True, first_keys=10, head_dim=64),
    Case(1000, queries=100, window=256, far=True, head_dim=64),
    Case(1000, documents=5, head_dim=64),
    # Operands that the kernels compute from magnitudes.
    *(Case(1000, rotated=rotated, heads=4, head_dim=64) for rotated in (16, 48, 64)),
    Case(1000, rotated=64, angles=True, heads=4, kv_heads=2, documents=5, formula="log", head_dim=64),
    Case(1000, rotated=32, angles=True, own_tables=True, queries=100, window=100, head_dim=64),
    Case(1000, rotated=24, queries=1, head_dim=24),
    Case(1000, documents=5, window=100, far=True, first_keys=4, formula="log", head_dim=64),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_all_gradients(case: Case, dtype: torch.dtype) -> None:
    """At most twice the error of a plain PyTorch run in the same precision."""
    check(case, dtype, "cuda")
