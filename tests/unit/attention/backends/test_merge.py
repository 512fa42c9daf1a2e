"""Merging with a kernel that has windows, as on CUDA: the same calls with a dense kernel on the CPU."""

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends import merge, reference
from megatron_coca.attention.backends.merge import MergeBackend
from megatron_coca.attention.backends.reference import ReferenceBackend
from megatron_coca.attention.backends.sdpa import CpuFlash, CudaFlash, Gradients
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Band
from tests.unit.attention.backends.test_backends import CHUNKS, NEAR_AND_FAR, THREE, in_dtype, make_inputs, results


class DenseFlash(CpuFlash):
    """A kernel with windows. It computes in float32 or better and rounds its results to the operands' dtype. Results
    are stored as CUDA's: a token's heads are adjacent.
    """

    windows = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        self.calls.append((q.shape[2], k.shape[2], window))
        if not window:
            return super().forward(q, k, v, causal, scale)
        q, k, wide = (self._wide(x, q.shape[1]) for x in (q, k, v))
        scores = self._scores(q, k, scale, window)
        return self._stored(scores.softmax(-1) @ wide, v), scores.logsumexp(-1)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        window: int = 0,
    ) -> Gradients:
        if not window:
            return super().backward(grad, q, k, v, out, lse, causal, scale)
        kv_heads, given = k.shape[1], v
        grad, q, k, v, out = (self._wide(x, q.shape[1]) for x in (grad, q, k, v, out))
        weights = (self._scores(q, k, scale, window) - lse[..., None]).exp()
        inner = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (inner.mT @ q, weights.mT @ grad))
        return self._stored(inner @ k, given), self._stored(dk, given), self._stored(dv, given)

    @staticmethod
    def _wide(x: Tensor, heads: int) -> Tensor:
        x = x.repeat_interleave(heads // x.shape[1], dim=1)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
        rows, columns = q.shape[2], k.shape[2]
        own = torch.arange(columns - rows, columns)[:, None]
        key = torch.arange(columns)
        return (q @ k.mT * scale).masked_fill((key > own) | (key <= own - window), -torch.inf)

    @staticmethod
    def _stored(x: Tensor, like: Tensor) -> Tensor:
        return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> DenseFlash:
    """The kernel that `merge` calls in the test."""
    dense = DenseFlash()
    monkeypatch.setattr(merge, "flash_op", lambda x: dense)
    return dense


def compared(inputs: AttentionInputs) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients of `merge`, each with the float64 reference."""
    cotangent = torch.randn(inputs.query.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = results(MergeBackend(), inputs, cotangent)
    exact = results(ReferenceBackend(), in_dtype(inputs, torch.float64), cotangent)
    return list(zip(found, exact, strict=True))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("length", "past"), [(1, 0), (2, 0), (3, 1), (33, 0), (33, 5), (33, 32), (64, 0), (70, 13)])
@pytest.mark.parametrize(
    "bands",
    [(CAUSAL,), NEAR_AND_FAR, THREE, (Band(0, 6),), (Band(0, 1), Band(1)), (Band(0, 100), Band(100)), CHUNKS],
    ids=["causal", "near and far", "three", "window", "window of 1", "window beyond the length", "chunks"],
)
def test_values_and_gradients_with_windows(
    bands: tuple[Band, ...], length: int, past: int, heads: tuple[int, int], kernel: DenseFlash
) -> None:
    for got, exact in compared(make_inputs(bands, length, past, heads=heads)):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-11 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize(
    ("bands", "calls"),
    [
        (NEAR_AND_FAR, [(64, 64, 4), (60, 60, 0)]),
        ((Band(0, 6),), [(64, 64, 6)]),
        ((Band(0, 4), Band(4, None, first_keys=2)), [(64, 64, 4), (2, 2, 0), (58, 2, 0)]),
    ],
    ids=["near and far", "window", "first keys"],
)
def test_a_band_is_one_call(bands: tuple[Band, ...], calls: list[tuple[int, int, int]], kernel: DenseFlash) -> None:
    MergeBackend().attend(make_inputs(bands, 64))
    assert kernel.calls == calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("bands", [(Band(0, 32), Band(32)), THREE, (Band(0, 32),)], ids=["two", "three", "one"])
def test_windows_round_no_more_than_plain_attention(
    bands: tuple[Band, ...], sinks: bool, dtype: torch.dtype, kernel: DenseFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Error at most twice that of dense attention in the same dtype, both against float64."""
    inputs = make_inputs(bands, 300, dtype=dtype)
    inputs = inputs.replace(sinks=torch.tensor([0.5, -1, 2, 4]) if sinks else None)
    found = compared(inputs)
    monkeypatch.setattr(reference, "widened", lambda inputs: inputs)
    cotangent = torch.randn(inputs.query.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = results(ReferenceBackend(), inputs, cotangent)
    for (got, exact), allowed in zip(found, plain, strict=True):
        assert got.dtype == dtype
        assert (got.double() - exact).norm() <= 2 * (allowed.double() - exact).norm()


def test_sums_of_two_terms_keep_the_dtype(kernel: DenseFlash, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two terms are rounded once, in half precision too; the first keys of three terms are summed in float32."""
    made: list[torch.dtype] = []
    accumulator = merge.Accumulator
    monkeypatch.setattr(merge, "Accumulator", lambda x: made.append(x.dtype) or accumulator(x))  # type: ignore[func-returns-value]
    half, single = torch.bfloat16, torch.float32
    inputs = make_inputs(NEAR_AND_FAR, 40, dtype=half)
    results(MergeBackend(), inputs, torch.ones_like(inputs.query))
    assert made == [half, single, *[half] * 5], "output, log-sum-exp, then the gradients of V and the operands"
    made.clear()
    inputs = make_inputs((Band(0, 4), Band(4, None, first_keys=2)), 40, dtype=half)
    results(MergeBackend(), inputs, torch.ones_like(inputs.query))
    assert made == [half, single, single, *[half] * 4]


def test_deterministic_runs_have_no_windows() -> None:
    assert CudaFlash().windows
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert not CudaFlash().windows
    finally:
        torch.use_deterministic_algorithms(before)
