"""The merge backend's CUDA kernels against float64, one by one and merged. Run with: python -m pytest -m gpu"""

import math

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import CudaFlash, flash_op
from megatron_coca.attention.inputs import AttentionInputs, Band, Segment

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BANDS = {
    "near and far": (Band(0, 64), Band(64)),
    "odd window": (Band(0, 100), Band(100)),
    "three": (Band(0, 32), Band(32, 200), Band(200, None, first_keys=10)),
    "first keys": (Band(0, 64), Band(64, None, first_keys=10)),
    "window": (Band(0, 96),),
    "chunks": (Band(0, 1, chunk=100), Band(1, 2, chunk=100), Band(2, chunk=100)),
    "narrow window": (Band(0, 2), Band(2)),
}
FLOOR = 16 * torch.finfo(torch.float32).eps
"""Errors below it are chance: one row of dense attention may be right to the last digit."""
BATCH, HEADS, KV_HEADS, HEAD_DIM, SCALE = 2, 4, 2, 64, 0.125


def normal(heads: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH, length, heads, HEAD_DIM, device="cuda").to(dtype).transpose(1, 2)


def results(attend, operands: list[Tensor], bands: tuple[Band, ...], cotangent: Tensor) -> list[Tensor]:
    """Output and gradients of V, Q'1, K'1, Q'2, ..., in float64."""
    leaves = [x.detach().requires_grad_() for x in operands]
    segments = tuple(Segment(q, k, band) for q, k, band in zip(leaves[1::2], leaves[2::2], bands, strict=True))
    out = attend(AttentionInputs(segments, leaves[0], SCALE))
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, cotangent.to(out.dtype)))]


def error(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def dense(inputs: AttentionInputs) -> Tensor:
    """Plain PyTorch in the operands' dtype, as flash kernels round: the reference backend would compute in float32."""
    queries, keys = inputs.query.shape[2], inputs.value.shape[2]
    groups = HEADS // KV_HEADS
    query, key = torch.arange(keys - queries, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
    scores = torch.full((), -math.inf, device="cuda", dtype=inputs.value.dtype)
    for segment in inputs.segments:
        product = segment.query @ segment.key.repeat_interleave(groups, 1).mT * inputs.scale
        band, distance = segment.band, segment.band.apart(query, key)
        inside = (key <= query) & (distance >= band.low)
        if band.high is not None:
            inside &= distance < band.high
        if band.first_keys is not None:
            inside &= key < band.first_keys
        scores = torch.where(inside, product, scores)
    return scores.softmax(-1) @ inputs.value.repeat_interleave(groups, 1)


@DTYPES
@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize(("length", "past"), [(512, 0), (1000, 0), (1000, 1), (1000, 333), (1000, 999)])
@pytest.mark.parametrize("name", BANDS)
def test_values_and_gradients(
    name: str, length: int, past: int, windows: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors at most twice those of dense attention in the same dtype, both against float64. Deterministic runs have no
    windows.
    """
    monkeypatch.setattr(CudaFlash, "windows", windows)
    torch.manual_seed(0)
    bands = BANDS[name]
    operands = [normal(KV_HEADS, length, dtype)]
    for _ in bands:
        operands += [normal(HEADS, length - past, dtype), normal(KV_HEADS, length, dtype)]
    cotangent = normal(HEADS, length - past, dtype)
    exact = results(ReferenceBackend().attend, [x.double() for x in operands], bands, cotangent)
    plain = results(dense, operands, bands, cotangent)
    merged = results(MergeBackend().attend, operands, bands, cotangent)
    for expected, allowed, got in zip(exact, plain, merged, strict=True):
        assert error(got, expected) <= max(2 * error(allowed, expected), FLOOR)


@DTYPES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 33, 250, 1024])
def test_a_kernel_alone(length: int, causal: bool, dtype: torch.dtype) -> None:
    """Log-sum-exp in natural base."""
    torch.manual_seed(0)
    q, k, v = (normal(heads, length, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = flash_op(q).forward(q, k, v, causal, SCALE)
    wide_k, wide_v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = q.double() @ wide_k.mT * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, device="cuda").triu(1).bool(), -torch.inf)
    assert lse.shape == (BATCH, HEADS, length)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-2)
    assert error(out.double(), scores.softmax(-1) @ wide_v) < 0.01


@DTYPES
@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(250, 250, 1), (250, 250, 100), (33, 250, 100), (33, 250, 250)]
)
def test_a_window_alone(queries: int, keys: int, window: int, dtype: torch.dtype) -> None:
    """The windows of the last query and of the last key end at the same place."""
    torch.manual_seed(0)
    q, k, v = (normal(heads, rows, dtype) for heads, rows in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys)))
    out, lse = flash_op(q).forward(q, k, v, True, SCALE, window)
    wide_k, wide_v = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    own, key = torch.arange(keys - queries, keys, device="cuda")[:, None], torch.arange(keys, device="cuda")
    scores = (q.double() @ wide_k.mT * SCALE).masked_fill((key > own) | (key <= own - window), -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-2)
    assert error(out.double(), scores.softmax(-1) @ wide_v) < 0.01


def test_full_precision_has_no_kernel() -> None:
    with pytest.raises(TypeError, match=r"torch.float32 on cuda; set triton"):
        flash_op(torch.zeros(1, device="cuda"))
