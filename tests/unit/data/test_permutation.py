"""The permutation: a bijection for every size and key, which looks uniform."""

from itertools import permutations

import numpy as np
import pytest

from megatron_coca.data.permutation import derive_key, permute


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 64, 65, 999, 1000, 4097])
def test_permutation_is_a_bijection(n: int) -> None:
    for key in (0, 1, derive_key("any")):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permutation_of_a_huge_range_is_immediate_and_distinct() -> None:
    n = 10**15 + 37
    images = permute(np.arange(5000) * 199999999999, n, 42)
    assert len(np.unique(images)) == 5000 and images.min() >= 0 and images.max() < n
    assert abs(images.mean() / n - 0.5) < 0.02
    with pytest.raises(ValueError, match=r"\[0, 10\)"):
        permute(np.array([10]), 10, 0)


def test_permutation_looks_uniform() -> None:
    keys = [derive_key("key", i) for i in range(6000)]
    orders = [tuple(permute(np.arange(3), 3, key)) for key in keys]
    counts = [orders.count(order) for order in permutations(range(3))]
    assert sum((c - 1000) ** 2 / 1000 for c in counts) < 20.5  # chi-square, 5 degrees of freedom, p = 0.001
    landed = np.bincount([int(permute(np.array([17]), 1000, key)[0]) // 50 for key in keys], minlength=20)
    assert ((landed - 300) ** 2 / 300).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    order = permute(np.arange(100000), 100000, keys[0])
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
    assert 0.97 < (np.diff(order) > 0).mean() / 0.5 < 1.03
