"""The attention kernels in Triton's interpreter (or on a GPU, if there is one), in float32, against float64."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.triton_cases import Case, check, run

triton = pytest.importorskip("triton")

from megatron_coca.attention.backends.triton import TritonBackend  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    # The interpreter's time grows with the batch: several rows where rows differ, and in one case of each kind.
    # One segment: lengths below, at the edge of and beyond the interpreter's blocks of 32.
    Case(1, formula="log", batch=1),
    Case(2, formula="power", batch=1),
    Case(63),
    Case(97, formula="linear", batch=1),
    Case(63, formula="log", documents=4),
    Case(97, queries=1, batch=1),
    Case(97, queries=40, documents=3),
    # A window without far pairs.
    Case(63, window=1, batch=1),
    Case(97, window=16, queries=33, batch=1),
    Case(63, window=300, formula="power", batch=1),
    # Two segments.
    Case(1, window=20, far=True, formula="power", batch=1),
    Case(63, window=2, far=True, formula="log", batch=1),
    Case(97, window=50, far=True, queries=50, batch=1),
    Case(63, window=300, far=True, batch=1),
    Case(97, window=16, far=True, formula="linear", documents=4),
    # Only the first keys are visible to distant queries.
    Case(97, window=16, far=True, first_keys=4, batch=1),
    Case(111, window=16, far=True, first_keys=40, batch=1),
    Case(97, queries=60, documents=3, window=16, far=True, first_keys=5),
    # Groups of heads and head sizes.
    Case(40, heads=4, kv_heads=4, head_dim=32, batch=1),
    Case(40, heads=4, kv_heads=2, head_dim=64, window=10, far=True, batch=1),
    Case(33, head_dim=128, batch=1),
    Case(40, head_dim=24, formula="linear", batch=1),
    # Values narrower than the operands.
    Case(63, head_dim=64, value_dim=32, formula="log", documents=3),
    Case(97, head_dim=48, value_dim=24, window=16, far=True, heads=4, kv_heads=2, batch=1),
    # Operands that the kernels compute from magnitudes.
    Case(63, rotated=16, batch=1),
    Case(97, rotated=16, angles=True, heads=4, kv_heads=2, formula="log", documents=3),
    Case(97, queries=40, head_dim=24, rotated=12, angles=True, window=16, batch=1),
    Case(70, queries=1, head_dim=32, rotated=32, own_tables=True),
    Case(63, head_dim=64, rotated=48, angles=True, own_tables=True, value_dim=32),
    Case(70, head_dim=128, rotated=128, angles=True, documents=3),
    Case(40, head_dim=72, rotated=72, heads=4, kv_heads=2, window=10),
]

CHOICES: tuple[tuple[Any, ...], ...] = (
    (2, 63, 111, 200),
    ("one", "half", "all"),
    ((None, False, None), (17, False, None), (17, True, None), (17, True, 5), (40, True, 40)),
    (None, "linear", "log", "power"),
    (False, True),
)
"""Lengths, queries, bands, biases, and documents or none."""


def covering(choices: tuple[tuple[Any, ...], ...]) -> Iterator[tuple[Any, ...]]:
    """Rows with one value of each choice, few of them, with every pair of values of two choices in one at least."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    rows = list(product(*choices))
    left = set().union(*map(pairs, rows))
    while left:
        row = max(rows, key=lambda row: len(pairs(row) & left))
        left -= pairs(row)
        yield row


MANY = [
    Case(
        length,
        {"one": 1, "half": max(1, length // 2), "all": length}[queries],
        *band,
        formula,
        1 + min(3, length - 1) if documents else 1,
    )
    for length, queries, band, formula, documents in covering(CHOICES)
]


@pytest.fixture
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN, so that what a kernel does not write, or reads without having written, shows."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty", filling(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filling(torch.empty_like))


@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_all_gradients(case: Case) -> None:
    """Lengths that fill no block, windows within one and beyond all, past tokens, groups, documents, biases."""
    check(case, torch.float32, DEVICE)


@pytest.mark.slow
@pytest.mark.usefixtures("dirty_memory")
@pytest.mark.parametrize("case", MANY, ids=str)
def test_every_pair_of_choices(case: Case) -> None:
    """Every kind of band with every bias, with documents and past tokens."""
    check(case, torch.float32, DEVICE)


def test_gradients_are_the_same_bits_each_time() -> None:
    """No sum depends on the order in which programs finish."""
    case = Case(63, window=16, far=True, formula="log", documents=3, batch=1)
    first, second = (run(case, TritonBackend(), torch.float32, DEVICE) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_keys_that_no_band_serves_are_not_read() -> None:
    """With a window, NaN in the keys far behind it changes nothing: their tiles are left out."""
    case = Case(130, queries=40, window=30, batch=1)
    clean = run(case, TritonBackend(), torch.float32, DEVICE)[0]
    leaves = case.leaves()
    for tensor in (leaves[0], leaves[2]):
        tensor[:, :, :32] = torch.nan
    spoiled = Spoiled(**vars(case), tensors=tuple(leaves))
    assert torch.equal(run(spoiled, TritonBackend(), torch.float32, DEVICE)[0], clean)


class Spoiled(Case):
    """A case with leaves of its own."""

    def __init__(self, tensors: tuple[Tensor, ...], **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "tensors", tensors)

    def leaves(self, draw: int = 0) -> list[Tensor]:
        """Those given, whatever the draw."""
        return list(self.tensors)
