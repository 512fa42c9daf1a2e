"""The blend: every sample once in an epoch, sources by their weights, and an order that only the seed decides."""

from pathlib import Path

import numpy as np
import pytest

from megatron_coca.data import Blend, DataError, Shard
from tests.unit.data.shard_files import make_shard


def test_an_epoch_visits_every_sample_once_and_the_next_cuts_elsewhere(shards: list[Shard]) -> None:
    blend = Blend(shards[:1], [1.0], 16, seed=3)
    n = (shards[0].len_tokens - 16) // 16
    starts = [blend.batch(np.arange(n) + epoch * n)[:, 0] for epoch in range(4)]
    for epoch in starts:
        assert np.array_equal(np.diff(np.sort(epoch)), np.full(n - 1, 16)) and 0 <= epoch.min() < 16
    assert len({int(epoch.min()) for epoch in starts}) > 1
    assert not np.array_equal(np.argsort(starts[0]), np.argsort(starts[1]))


def test_samples_are_consecutive_tokens_across_documents(shards: list[Shard]) -> None:
    rows = Blend(shards, [3, 1], 32, seed=0).batch(np.arange(400))
    assert rows.shape == (400, 33) and rows.dtype == np.int64
    assert np.array_equal(np.diff(rows, axis=1), np.ones((400, 32)))


@pytest.mark.parametrize("tokens", [9, 10, 15, 16, 17, 24])
def test_the_shortest_usable_shards(tmp_path: Path, tokens: int) -> None:
    rows = Blend([make_shard(tmp_path / "s", [tokens])], [1], 8, seed=1).batch(np.arange(200))
    assert rows.min() >= 0 and rows.max() < tokens


@pytest.mark.parametrize("weights", [(0.75, 0.25), (1, 1), (2, 1), (0.9, 0.1), (1000, 1)])
def test_weights_are_achieved(shards: list[Shard], weights: tuple[float, float]) -> None:
    blend = Blend(shards, weights, 8, seed=0)
    expected = weights[0] / sum(weights)
    for n in (2000, 65536, 100000, 10**9):
        text, code = blend.mixture(n)
        assert abs(text.fraction - expected) < 1e-3 and text.samples + code.samples == n
    sources, running = blend.locate(np.arange(150000))
    assert [share.samples for share in blend.mixture(150000)] == np.bincount(sources).tolist()
    assert all(np.array_equal(running[sources == s], np.arange((sources == s).sum())) for s in (0, 1))
    assert blend.mixture(4000)[1].epochs == pytest.approx(blend.mixture(4000)[1].samples / ((933 - 8) // 8))


GOLDEN_STARTS = [3435, 571, 10643, 2411, 2715, 3499]


def test_order_depends_on_seed_only(shards: list[Shard]) -> None:
    def read(seed: int) -> np.ndarray:
        return Blend(shards, [3, 1], 16, seed).batch(np.arange(64))

    assert np.array_equal(read(7), read(7)) and not np.array_equal(read(7), read(8))
    golden = Blend(shards, [3, 1], 16, seed=1234).batch(np.arange(6))[:, 0]
    assert golden.tolist() == GOLDEN_STARTS  # other numbers here would change the data of every run


@pytest.mark.parametrize(
    ("weights", "seq_length", "message"),
    [
        ([1.0], 16, "give one weight for each shard"),
        ([1.0, 0.0], 16, "must be positive"),
        ([1.0, float("nan")], 16, "must be positive"),
        ([1.0, 1.0], 933, r"code: only 933 tokens, .*seq_length \+ 1 = 934"),
        ([1.0, 1.0], 0, "seq_length: must be at least 1"),
    ],
)
def test_impossible_blends_are_errors(shards: list[Shard], weights: list[float], seq_length: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Blend(shards, weights, seq_length, seed=0)


@pytest.mark.parametrize("weight", [1e-6, 5e-6, 1e-9])
def test_a_rare_source_is_read_as_often_as_its_weight_says(shards: list[Shard], weight: float) -> None:
    blend, alone = Blend(shards, [1.0, weight], 16, seed=0), Blend(shards[:1], [1.0], 16, seed=0)
    samples = 40 * 65536
    source, running = blend.locate(np.arange(samples, dtype=np.int64))
    taken = int(samples * weight / (1 + weight))
    assert np.flatnonzero(source == 1).size == taken and running[source == 1].tolist() == list(range(taken))
    for some in (samples, 12345, 65536 * 7 + 40000):
        counts = [share.samples for share in blend.mixture(some)]
        assert counts == [int((source[:some] == number).sum()) for number in (0, 1)]
    same = source == 0
    assert np.array_equal(running[same], alone.locate(np.arange(samples, dtype=np.int64))[1][same])
