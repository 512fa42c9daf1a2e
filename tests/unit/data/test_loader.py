"""The loader: the same batches for any number of ranks, from any first step, read ahead."""

import time

import numpy as np
import pytest

from megatron_coca.data import Blend, DataError, Loader, Shard
from megatron_coca.data.blend import SourceSamples
from tests.patience import patience


def read_step(blend: Blend, step: int, micro: int, world: int) -> list[np.ndarray]:
    """All ranks' micro-batches of a step, in the order (accumulation, rank)."""
    ranks = []
    for rank in range(world):
        with Loader(blend, 24, micro, rank, world) as loader:
            ranks.append([batch.tokens for batch in loader.micro_batches(step)])
    return [ranks[rank][a] for a in range(24 // (micro * world)) for rank in range(world)]


def test_ranks_together_read_the_same_whatever_their_number(shards: list[Shard]) -> None:
    blend = Blend(shards, [3, 1], 16, seed=5)
    expected = blend.batch(np.arange(48, 72))
    for micro, world in ((24, 1), (4, 1), (4, 2), (2, 4), (1, 8), (3, 8)):
        micro_batches = read_step(blend, 2, micro, world)
        assert all(m.shape == (micro, 17) and m.dtype == np.int64 for m in micro_batches)
        assert np.array_equal(np.concatenate(micro_batches), expected)


def test_a_fresh_loader_gives_what_a_running_one_gives(shards: list[Shard]) -> None:
    blend = Blend(shards, [3, 1], 16, seed=5)

    def read(loader: Loader, step: int) -> np.ndarray:
        return np.stack([batch.tokens for batch in loader.micro_batches(step)])

    with Loader(blend, 8, 2, 0, 2) as running:
        history = [read(running, step) for step in range(300)]
    for step, workers in ((299, 0), (0, 1), (150, 2), (151, 5)):
        with Loader(Blend(shards, [3, 1], 16, seed=5), 8, 2, 0, 2, num_workers=workers) as fresh:
            for wanted in (step, 7, 8, 10, 9):
                assert np.array_equal(read(fresh, wanted), history[wanted])


class CountingBlend(Blend):
    """Notes which samples were read, and fails at one of them."""

    fails_at = -1

    def by_source(self, indices: np.ndarray) -> list[SourceSamples]:
        self.seen = [*getattr(self, "seen", []), *map(int, indices)]
        if self.fails_at in indices:
            raise DataError(f"sample {self.fails_at} cannot be read")
        return super().by_source(indices)


def test_the_next_step_is_read_ahead_and_only_once(shards: list[Shard]) -> None:
    blend = CountingBlend(shards, [3, 1], 16, seed=5)
    with Loader(blend, 2, 2, 0, 1) as loader:
        loader.micro_batches(0)
        deadline = time.monotonic() + patience(10)
        while blend.seen != [0, 1, 2, 3] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert blend.seen == [0, 1, 2, 3]
        loader.micro_batches(1)
    assert blend.seen[:4] == [0, 1, 2, 3] and blend.seen.count(2) == 1


def test_an_error_while_reading_ahead_is_raised_at_its_step(shards: list[Shard]) -> None:
    blend = CountingBlend(shards, [3, 1], 16, seed=5)
    blend.fails_at = 2
    with Loader(blend, 2, 2, 0, 1) as loader:
        assert len(loader.micro_batches(0)) == 1
        with pytest.raises(DataError, match="sample 2 cannot be read"):
            loader.micro_batches(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((10, 4, 0, 1), "10 is not a multiple"), ((8, 4, 2, 2), "below the number of ranks, 2, not 2")],
)
def test_impossible_batches_are_errors(shards: list[Shard], arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Loader(Blend(shards, [3, 1], 16, seed=5), *arguments)
