"""Biases against their formulas, in the precision that long contexts need, with their gradients."""

import math

import pytest
import torch
from torch import Tensor

from megatron_coca.attention.backends.cpu_bias import biased_attention
from megatron_coca.attention.inputs import DistanceBias
from megatron_coca.attention.positions.bias import (
    AlibiBias,
    BucketBias,
    KerpleLogBias,
    KerplePowerBias,
    LearnedBuckets,
    LearnedKerpleLog,
    LearnedKerplePower,
    alibi_slopes,
    bucket_starts,
)

KNOWN_SLOPES = {
    8: [2.0**-h for h in range(1, 9)],
    16: [2.0 ** (-h / 2) for h in range(1, 17)],
    12: [2.0**-h for h in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5],
}
COEFFICIENTS = torch.tensor([[0.5, 0.02], [1.5, 1.0], [2.0, 0.3]])
TABLE = torch.arange(64, dtype=torch.float32).view(2, 32)


def by_hand(bias: DistanceBias, r: int) -> list[float]:
    formulas = {
        "linear": lambda c: -c[0] * r,
        "log": lambda c: -c[0] * math.log(1 + c[1] * r),
        "power": lambda c: -c[0] * r ** c[1],
        "buckets": lambda c: c[t5_bucket(r)],
    }
    return [formulas[bias.formula](row) for row in bias.coefficients.double().tolist()]


def t5_bucket(r: int, buckets: int = 32, max_distance: int = 128) -> int:
    exact = buckets // 2
    if r < exact:
        return r
    step = math.floor((buckets - exact) * math.log(r / exact) / math.log(max_distance / exact) + 1e-9)
    return min(exact + step, buckets - 1)


BIASES = {
    "linear": AlibiBias(alibi_slopes(12)),
    "log": KerpleLogBias(COEFFICIENTS),
    "power": KerplePowerBias(COEFFICIENTS),
    "buckets": BucketBias(TABLE),
}


@pytest.mark.parametrize("heads", KNOWN_SLOPES)
def test_alibi_slopes(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(KNOWN_SLOPES[heads], rel=1e-15)


@pytest.mark.parametrize("formula", BIASES)
def test_every_bias_is_its_formula(formula: str) -> None:
    bias = BIASES[formula]
    assert bias.formula == formula and bias.coefficients.dtype == torch.float32
    tolerance = 6e-8 if formula == "linear" else 1e-12  # `at` rounds ALiBi's slopes only to the dtype of the distance
    distances = torch.tensor([0, 1, 2, 15, 16, 63, 64, 127, 128, 1000, 32767], dtype=torch.float64)
    values = bias.at(distances)
    assert values.dtype == torch.float64 and values.shape == (bias.coefficients.shape[0], 11)
    for column, r in enumerate(distances.tolist()):
        assert values[:, column].tolist() == pytest.approx(by_hand(bias, int(r)), rel=tolerance, abs=0)


@pytest.mark.parametrize("formula", BIASES)
def test_shape_and_dtype_follow_the_distance(formula: str) -> None:
    bias, distance = BIASES[formula], torch.arange(12, dtype=torch.float32)
    square = bias.at(distance.view(3, 4))
    assert square.shape == (bias.coefficients.shape[0], 3, 4) and square.dtype == torch.float32
    assert torch.equal(square.flatten(1), bias.at(distance))
    assert bias.at(distance[:0]).shape == (bias.coefficients.shape[0], 0)
    torch.testing.assert_close(square.double(), bias.at(distance.double().view(3, 4)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("formula", ["linear", "log", "power"])
def test_every_distance_at_32k_stays_apart(formula: str) -> None:
    distance = torch.arange(32768 - 512, 32768, dtype=torch.float32)
    bias = {**BIASES, "log": KerpleLogBias(torch.tensor([[1.5, 1.0]]))}[formula].at(distance)
    least = 512 if formula == "linear" else 400  # the precision of float32 for such flat curves
    assert all(len(row.unique()) >= least for row in bias[:1])
    assert (bias.diff() <= 0).all()


def test_alibi_coefficients_are_one_tensor_per_device() -> None:
    bias = AlibiBias(alibi_slopes(8))
    assert bias.coefficients.tolist() == [[slope] for slope in KNOWN_SLOPES[8]]
    assert bias.coefficients is AlibiBias(alibi_slopes(8)).coefficients
    assert bias.to(torch.device("cpu")) is bias
    assert bias.to(torch.device("meta")).coefficients.device.type == "meta"
    assert bias.at(torch.ones(3, device="meta")).device.type == "meta"


def test_alibi_coefficients_made_in_inference_mode_can_be_saved_for_backward() -> None:
    slopes = (0.123, 0.456)  # of no other test: the tensor is kept
    with torch.inference_mode():
        AlibiBias(slopes).at(torch.ones(2, dtype=torch.float64))
        AlibiBias(slopes).coefficients  # noqa: B018
    x = torch.ones(2, 1, requires_grad=True)
    (x * AlibiBias(slopes).coefficients).sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx(slopes)


@pytest.mark.parametrize("kind", [KerpleLogBias, KerplePowerBias])
def test_gradients_of_the_coefficients(kind: type) -> None:
    distances = torch.tensor([0.0, 1, 2, 7, 100], dtype=torch.float64)
    coefficients = COEFFICIENTS.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda c: kind(c).at(distances), (coefficients,))
    assert torch.autograd.gradcheck(lambda c: BucketBias(c).at(distances), (TABLE.double().requires_grad_(),))


def test_the_power_bias_at_no_distance_is_zero_with_zero_gradients() -> None:
    coefficients = COEFFICIENTS.clone().requires_grad_()
    value = KerplePowerBias(coefficients).at(torch.zeros(4))
    value.sum().backward()
    assert not value.any() and not coefficients.grad.any()


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (32, 256), (64, 1024), (2, 2), (3, 9), (32, 20)])
def test_buckets_of_every_distance(buckets: int, furthest: int) -> None:
    table = torch.arange(buckets, dtype=torch.float64)[None]
    found = BucketBias(table, furthest).at(torch.arange(2 * furthest, dtype=torch.float64))[0]
    assert found.tolist() == [t5_bucket(r, buckets, furthest) for r in range(2 * furthest)]
    assert bucket_starts(buckets, furthest)[0] == 0 and len(bucket_starts(buckets, furthest)) == buckets


@pytest.mark.parametrize("module", [LearnedKerpleLog(64), LearnedKerplePower(64), LearnedBuckets(64, 16)])
def test_weights_follow_the_seed_and_survive_a_cast(module: torch.nn.Module) -> None:
    drawn = []
    for seed in (3, 3, 4):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module.reset_parameters()
        drawn.append(torch.cat([weight.detach().flatten() for weight in module.parameters()]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert module.bfloat16()().dtype == torch.float32


@pytest.mark.parametrize(("module", "order"), [(LearnedKerpleLog, "pa"), (LearnedKerplePower, "ap")])
def test_kerple_weights_are_drawn_and_ordered_as_declared(module: type, order: str) -> None:
    learned = module(2000)
    assert {name: weight.shape for name, weight in learned.named_parameters()} == {
        "bias_p": (2000,),
        "bias_a": (2000,),
    }
    p, a = learned.bias_p.detach(), learned.bias_a.detach()
    assert 1.98 < p.max() <= 2 and 0 <= p.min() < 0.02 and 0.99 < a.max() <= 1 and 0 <= a.min() < 0.01
    columns = dict(zip(order, learned.distance_bias().coefficients.unbind(-1), strict=True))
    torch.testing.assert_close(columns["p"], p.clamp(min=0.01), rtol=0, atol=0)
    torch.testing.assert_close(columns["a"], a.clamp(min=0.01), rtol=0, atol=0)


def weights_after_descent(learned: torch.nn.Module, direction: float) -> tuple[Tensor, Tensor]:
    """Gradients of (p, a) where the loss is `direction` times the sum of the coefficients."""
    learned.zero_grad()
    (direction * learned.distance_bias().coefficients.sum()).backward()
    return learned.bias_p.grad, learned.bias_a.grad


@pytest.mark.parametrize("module", [LearnedKerpleLog, LearnedKerplePower])
def test_weights_beyond_a_bound_are_bounded_and_can_come_back(module: type) -> None:
    learned, power = module(4), module is LearnedKerplePower
    with torch.no_grad():
        learned.bias_p.copy_(torch.tensor([-1.0, 0.01, 1.0, 3.0]))
        learned.bias_a.copy_(torch.tensor([-1.0, 0.01, 1.0, 3.0]))
    a, p = (
        learned.distance_bias().coefficients.unbind(-1)
        if power
        else learned.distance_bias().coefficients.flip(-1).unbind(-1)
    )
    assert a.tolist() == pytest.approx([0.01, 0.01, 1.0, 3.0])
    assert p.tolist() == pytest.approx([0.01, 0.01, 1.0, 2.0 if power else 3.0])
    p_down, a_down = weights_after_descent(learned, 1.0)
    assert p_down.tolist() == a_down.tolist() == [0, 0, 1, 1]
    p_up, a_up = weights_after_descent(learned, -1.0)
    assert a_up.tolist() == [-1, -1, -1, -1] and p_up.tolist() == [-1, -1, -1, 0 if power else -1]


def test_the_bucket_table_is_scaled_like_gpt_neox() -> None:
    learned = LearnedBuckets(heads=4, head_dim=64)
    assert learned.weight.shape == (32, 4)
    bias = learned.distance_bias()
    assert bias.coefficients.shape == (4, 32) and bias.max_distance == 128
    assert torch.equal(bias.coefficients, 8 * learned.weight.T)
    bias.at(torch.tensor([0.0, 0.0, 500.0])).sum().backward()
    assert learned.weight.grad.sum(1).tolist() == [64.0] + [0.0] * 30 + [32.0]


def test_the_bucket_table_is_drawn_with_the_xavier_deviation() -> None:
    deviation = float(LearnedBuckets(heads=1000, head_dim=64).weight.detach().std())
    assert deviation == pytest.approx(math.sqrt(2 / 1032), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("formula", ["log", "power", "buckets"])
def test_learned_coefficients_have_gradients_of_float32_in_half_precision(formula: str, dtype: torch.dtype) -> None:
    """They are sums over all pairs in which most cancels, so that an output rounded to half precision shows."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 2, 33, 16, generator=generator).to(dtype) for _ in range(4)]
    kind, start = type(BIASES[formula]), BIASES[formula].coefficients[:2]

    def gradient(wide: torch.dtype) -> Tensor:
        query, key, value, cotangent = (x.to(wide) for x in given)
        coefficients = start.clone().requires_grad_()
        out = biased_attention(query, key, value, 0.25, kind(coefficients))
        assert out.dtype == wide
        return torch.autograd.grad(out, coefficients, cotangent)[0]

    torch.testing.assert_close(gradient(dtype), gradient(torch.float32), rtol=1e-5, atol=1e-6)
