"""Evaluation at many lengths, decoding, and runs that repeat bit for bit. Run with: python -m pytest -m gpu"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends import flex
from megatron_coca.attention.backends.reference import ReferenceBackend, attend_in_blocks
from megatron_coca.attention.build import BACKENDS
from megatron_coca.attention.inputs import CAUSAL, AttentionInputs, Band, Segment
from megatron_coca.attention.positions.bias import AlibiBias, LearnedBuckets, alibi_slopes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HEADS, HEAD_DIM = 16, 64


def normal(batch: int, heads: int, length: int) -> Tensor:
    return torch.randn(batch, length, heads, HEAD_DIM, device="cuda").bfloat16().transpose(1, 2)


def distance(backend: str, given: AttentionInputs) -> float:
    """Relative error against float64 on the GPU."""
    wide = tuple(Segment(x.query.double(), x.key.double(), x.band) for x in given.segments)
    exact = ReferenceBackend().attend(given.replace(segments=wide, value=given.value.double()))
    got = BACKENDS[backend].attend(given).double()
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("formula", ["linear", "buckets"])
@torch.no_grad()
def test_two_hundred_lengths(formula: str) -> None:
    """ALiBi by `triton`, T5's buckets by `flex`, each compiled a few times."""
    torch.compiler.reset()
    linear = AlibiBias(alibi_slopes(HEADS)).to(torch.device("cuda"))
    bias = linear if formula == "linear" else LearnedBuckets(HEADS, HEAD_DIM).cuda().distance_bias()
    backend = "triton" if formula == "linear" else "flex"
    for number in range(200):
        length = 33 + 19 * number
        q, k, v = (normal(1, heads, length) for heads in (HEADS, 4, 4))
        assert distance(backend, AttentionInputs((Segment(q, k, CAUSAL),), v, 0.125, bias)) < 0.01
    shapes = {flex.padded_size(33 + 19 * number, flex.BLOCK) for number in range(200)}
    assert len(shapes) <= 16
    torch.compiler.reset()


@pytest.mark.parametrize(("kv_heads", "batch"), [*product([1, 2, 4, 8, 16], [1, 3])])
@torch.no_grad()
def test_one_query_after_any_number_of_keys(kv_heads: int, batch: int) -> None:
    """Out of a longer buffer, as a cache gives them."""
    buffers = [normal(batch, kv_heads, 4200) for _ in range(2)]
    for length in (1, 2, 31, 64, 65, 127, 128, 129, 500, 1000, 4096):
        k, v = (buffer[:, :, :length] for buffer in buffers)
        given = AttentionInputs((Segment(normal(batch, HEADS, 1), k, CAUSAL),), v, 0.125)
        assert all(distance(backend, given) < 0.01 for backend in ("sdpa", "triton"))  # `max` would pass over NaN


def twice(attend: Callable[[list[Tensor]], Tensor]) -> bool:
    """True if output and gradients of two calls have the same bits."""
    torch.manual_seed(0)
    operands = [normal(4, HEADS, 1000) for _ in range(3)]
    cotangent = normal(4, HEADS, 1000)
    results = []
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_() for x in operands]
        out = attend(leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, cotangent)])
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["sdpa", "triton", "merge"])
def test_deterministic_attention_repeats_its_bits(backend: str) -> None:
    bands = (Band(),) if backend == "sdpa" else (Band(0, 256), Band(256))

    def attend(leaves: list[Tensor]) -> Tensor:
        q, k, v = leaves
        return BACKENDS[backend].attend(AttentionInputs(tuple(Segment(q, k, band) for band in bands), v, 0.125))

    torch.use_deterministic_algorithms(True)
    try:
        assert all(twice(attend) for _ in range(3))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("gated", [False, True])
def test_recomputed_attention_draws_the_same_dropout(gated: bool) -> None:
    """So the backward pass leaves the random state as it is."""
    q, k, v = (normal(2, HEADS, 600).requires_grad_() for _ in range(3))
    given = AttentionInputs((Segment(q, k, CAUSAL),), v, 0.125, dropout=0.2)
    if gated:
        attended = BACKENDS["sdpa"].attend(given.replace(gates=torch.zeros(2, HEADS, 600, device="cuda")))
    else:
        attended = attend_in_blocks(given)
    before = torch.cuda.get_rng_state()
    attended.float().sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_of_the_second_gpu() -> None:
    q, k, v = (normal(2, HEADS, 300).to("cuda:1") for _ in range(3))
    with torch.cuda.device(0):
        assert distance("triton", AttentionInputs((Segment(q, k, CAUSAL),), v, 0.125)) < 0.01
