"""Data that are left out: every place is read at most once, a place that is left out never."""

import json
import random

import pytest

from megatron_coca.training.loss_guard import DataSkips, Gap


def positions(skips: DataSkips, count: int = 200) -> list[int]:
    return [skips.position(step) for step in range(count)]


def test_nothing_left_out() -> None:
    assert positions(DataSkips(), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("calls", "gaps", "first_places"),
    [
        ([(2, 3)], [(2, 2)], [0, 1, 4, 5, 6, 7]),
        ([(0, 0)], [(0, 1)], [1, 2, 3, 4, 5, 6]),
        ([(2, 2), (4, 4)], [(2, 1), (5, 1)], [0, 1, 3, 4, 6, 7]),
        ([(2, 2), (2, 2)], [(2, 2)], [0, 1, 4, 5, 6, 7]),
        ([(4, 4), (2, 2)], [(2, 1), (4, 1)], [0, 1, 3, 5, 6, 7]),
        ([(4, 4), (3, 3)], [(3, 2)], [0, 1, 2, 5, 6, 7]),
        ([(3, 3), (1, 4)], [(1, 5)], [0, 6, 7, 8, 9, 10]),
    ],
)
def test_by_hand(calls: list[tuple[int, int]], gaps: list[tuple[int, int]], first_places: list[int]) -> None:
    skips = DataSkips()
    for first, last in calls:
        skips = skips.skip(first, last)
    assert skips.gaps == tuple(Gap(*gap) for gap in gaps)
    assert positions(skips, 6) == first_places


@pytest.mark.parametrize("seed", range(20))
def test_any_row_of_rollbacks(seed: int) -> None:
    """Against the definition: the places in order, without those that the bad steps read."""
    generator = random.Random(seed)
    skips, left_out = DataSkips(), set[int]()
    for _ in range(generator.randrange(1, 8)):
        first = generator.randrange(40)
        last = first + generator.randrange(6)
        remaining = [place for place in range(1000) if place not in left_out]
        left_out |= set(remaining[first : last + 1])
        before, skips = positions(skips, first), skips.skip(first, last)
        assert positions(skips, first) == before, "what comes before the rollback is read as before"
    assert positions(skips) == [place for place in range(1000) if place not in left_out][:200]
    assert all(gap.end < after.begin for gap, after in zip(skips.gaps, skips.gaps[1:], strict=False))


def test_state_survives_json() -> None:
    skips = DataSkips().skip(3, 5).skip(10, 10)
    assert DataSkips.restore(json.loads(json.dumps(skips.state()))) == skips
