"""Weights in flat buckets: their layout on every rank, and steps of one rank and of several imitated ones."""

from typing import Any

import pytest
import torch
import torch.nn as nn

from megatron_coca.training.engine import flat_weights
from megatron_coca.training.engine.flat_weights import Bucket, FlatWeights

SIZES = (3, 10, 4, 6)


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_parts_of_all_ranks_are_the_parameters(ranks: int, dtype: torch.dtype) -> None:
    expected = [parameter.detach().clone() for parameter in parameters(dtype)]
    found = [torch.full_like(each, torch.nan) for each in expected]
    for rank in range(ranks):
        own = parameters(dtype)
        bucket = Bucket(own, rank, ranks)
        assert len(bucket.weights) % (2 * ranks) == 0 and len(bucket.own) * ranks == len(bucket.weights)
        assert bucket.master.dtype == torch.float32 and (bucket.master is bucket.own) == (dtype == torch.float32)
        for each in bucket.ranges:
            index = next(place for place, parameter in enumerate(own) if parameter is each.parameter)
            assert each.flat is bucket.master
            found[index][each.start : each.start + each.numel] = each.of(bucket.master).to(dtype)
        for parameter, values in zip(own, expected, strict=True):
            assert torch.equal(parameter, values)
            assert parameter.untyped_storage().data_ptr() == bucket.weights.untyped_storage().data_ptr()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def optimizer(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.1, fused=True)


def gradients(step: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=draw).to(dtype) for size in SIZES]


def backward(weights: list[nn.Parameter], of_step: list[torch.Tensor]) -> None:
    torch.stack([(weight * gradient).sum() for weight, gradient in zip(weights, of_step, strict=True)]).sum().backward()


def test_one_rank_updates_as_the_optimizer_does() -> None:
    plain, weights = parameters(torch.float32), parameters(torch.float32)
    expected, flat = optimizer(plain), FlatWeights(optimizer(weights), 0, 1, 5, sums_in_float32=False)
    for step in range(3):
        flat.begin_pass(last=False)
        backward(weights, gradients(step, 0, torch.float32))
        flat.end_pass()
        assert all(master.grad is None for master in flat.masters())
        flat.begin_pass(last=True)
        backward(weights, gradients(step, 1, torch.float32))
        flat.end_pass()
        for rank in range(2):
            backward(plain, gradients(step, rank, torch.float32))
        norm = nn.utils.clip_grad_norm_(plain, 1.0)
        assert norm > 1.0
        torch.testing.assert_close(flat.norm(), norm)
        flat.clip(flat.norm(), 1.0)
        flat.step()
        flat.clear()
        expected.step()
        expected.zero_grad()
    assert all(weight.grad is None for weight in weights)
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one, other)


def test_float32_sums_keep_small_gradients() -> None:
    for keeps in (False, True):
        weights = parameters(torch.bfloat16)
        flat = FlatWeights(optimizer(weights), 0, 1, 5, sums_in_float32=keeps)
        for number, size in enumerate((1.0, 2**-10, 2**-10)):
            flat.begin_pass(last=number == 2)
            backward(weights, [torch.full((count,), size, dtype=torch.bfloat16) for count in SIZES])
            flat.end_pass()
        expected = 1.0 + 2**-9 if keeps else 1.0
        assert all((each.of(each.flat.grad) == expected).all() for each in flat.ranges())


class Ranks:
    """Collectives of two imitated ranks: the other rank has the gradients and parts that the test gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reduced: list[int] = []
        self.waits = 0
        monkeypatch.setattr(flat_weights, "_reduce_scatter", self.reduce_scatter)
        monkeypatch.setattr(flat_weights, "_all_gather", self.all_gather)
        monkeypatch.setattr(flat_weights.dist, "all_reduce", lambda total: total.mul_(2))

    def wait(self) -> None:
        self.waits += 1

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, async_op: bool) -> Any:
        assert async_op
        self.reduced.append(len(whole))
        part.copy_(2 * whole[: len(part)])  # the other rank has equal gradients
        return self

    def all_gather(self, whole: torch.Tensor, part: torch.Tensor, async_op: bool) -> Any:
        assert async_op and part.data_ptr() == whole.data_ptr()
        return self


def test_buckets_are_reduced_in_one_order_while_the_backward_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, weights = Ranks(monkeypatch), parameters(torch.float32)
    flat = FlatWeights(optimizer(weights), 0, 2, 4, sums_in_float32=False)
    assert [len(bucket.weights) for bucket in flat._order] == [12, 4, 8, 4]  # last to first, group by group
    flat.begin_pass(last=True)
    weights[3].sum().backward()
    assert ranks.reduced == []  # the first bucket in the order comes first
    weights[1].sum().backward()
    assert ranks.reduced == [12]
    weights[0].sum().backward()
    assert ranks.reduced == [12, 4, 8]
    flat.end_pass()  # weights[2] was not used
    assert ranks.reduced == [12, 4, 8, 4] and ranks.waits == 4
    present = {id(each.parameter): float(each.of(each.flat.grad).sum()) for each in flat.ranges()}
    assert present == {id(weights[0]): 2.0, id(weights[1]): 6.0, id(weights[2]): 0.0, id(weights[3]): 4.0}
    assert float(flat.norm()) == pytest.approx((2 * 12) ** 0.5)


def test_gradients_of_earlier_passes_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    for early in (False, True):
        ranks, weights = Ranks(monkeypatch), parameters(torch.bfloat16)
        flat = FlatWeights(optimizer(weights), 0, 2, 100, sums_in_float32=early)
        for last in (False, True):
            flat.begin_pass(last)
            backward(weights, [torch.ones(size, dtype=torch.bfloat16) for size in SIZES])
            flat.end_pass()
            assert len(ranks.reduced) == 2 * (last + early)
        assert all((each.of(each.flat.grad) == 2.0).all() for each in flat.ranges())


def test_a_norm_that_is_not_finite_is_infinite() -> None:
    for value in (torch.nan, torch.inf):
        weights = parameters(torch.bfloat16)
        flat = FlatWeights(optimizer(weights), 0, 1, 5, sums_in_float32=False)
        flat.begin_pass(last=True)
        backward(weights, [torch.full((size,), value, dtype=torch.bfloat16) for size in SIZES])
        flat.end_pass()
        assert flat.norm() == torch.inf


def test_closed_weights_free_their_memory() -> None:
    weights = parameters(torch.bfloat16)
    flat = FlatWeights(optimizer(weights), 0, 1, 5, sums_in_float32=False)
    flat.close()
    assert all(weight.numel() == 0 for weight in weights) and not list(flat.ranges()) and not flat.optimizer.state
