"""Shards, the permutation, the blend and the loader: the same data whoever reads them, and wherever a run began."""

import struct
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from megatron_coca.data import Blend, DataError, Loader, Shard
from megatron_coca.data.blend import SourceSamples
from megatron_coca.data.permutation import derive_key, permute
from megatron_coca.data.shards import ShardWriter

ROOT = Path(__file__).parents[3]


def make_shard(prefix: Path, lengths: list[int], first: int = 0, vocab_size: int = 60000) -> Shard:
    """Documents of consecutive numbers, so that every token says where it stands."""
    writer = ShardWriter(prefix, vocab_size)
    for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        writer.add(np.arange(begin, begin + length) + first)
    writer.finish()
    return Shard(prefix)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    folder = tmp_path_factory.mktemp("shards")
    return [make_shard(folder / "text", [100, 1, 57, 4000]), make_shard(folder / "code", [900, 33], first=10000)]


def write_neox_pair(prefix: Path, documents: list[list[int]], itemsize_code: tuple[str, int]) -> None:
    """The bytes as GPT-NeoX lays them out, written without any library."""
    kind, code = itemsize_code
    size = np.dtype(kind).itemsize
    lengths = np.array([len(d) for d in documents])
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1)
    pointers = (np.cumsum(lengths) - lengths) * size
    index = [lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(documents) + 1, dtype="<i8")]
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in index))
    prefix.with_suffix(".bin").write_bytes(np.concatenate(documents).astype(kind).tobytes())


@pytest.mark.parametrize("code", [("<u2", 8), ("<i4", 4), ("<i8", 5), ("u1", 1)])
def test_reads_what_gpt_neox_writes(tmp_path: Path, code: tuple[str, int]) -> None:
    documents = [[5, 6, 7], [8], [9, 10, 11, 12]]
    write_neox_pair(tmp_path / "pile_text_document", documents, code)
    shard = Shard(tmp_path / "pile_text_document")
    assert (shard.documents, shard.len_tokens) == (3, 8)
    assert [shard.document(i).tolist() for i in range(3)] == documents
    across = shard.tokens(2, 4)
    assert across.tolist() == [7, 8, 9, 10] and across.dtype == np.int64 and across.flags.writeable


def test_writes_what_gpt_neox_would(tmp_path: Path) -> None:
    make_shard(tmp_path / "ours", [3, 2])
    write_neox_pair(tmp_path / "theirs", [[0, 1, 2], [3, 4]], ("<u2", 8))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    assert make_shard(tmp_path / "large", [3], vocab_size=65500).dtype == np.int32


def test_a_token_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        ShardWriter(tmp_path / "s", 10).add([3, 10])


def damage(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda b: b"TNTIDX\0\0" + b[8:], r"\.idx: not an MMIDIDX index"),
        (".idx", lambda b: b"", r"\.idx: not an MMIDIDX index"),
        (".idx", lambda b: b[:20], r"\.idx: truncated within its header"),
        (".idx", lambda b: b[:-8], r"\.idx: truncated or of another format"),
        (".idx", lambda b: b[:17] + b"\x06" + b[18:], "dtype code 6"),
        (".idx", lambda b: b[:34] + struct.pack("<i", 2) + b[38:], "without gaps"),
        (".idx", lambda b: b[:-16] + struct.pack("<qq", 7, 2), "out of order"),
        (".bin", lambda b: b[:-2], r"\.bin: 8 bytes where its index records 10"),
        (".bin", lambda b: b + b"xx", r"\.bin: 12 bytes where"),
        (".bin", lambda b: b"", "contains no token"),
    ],
)
def test_damaged_and_foreign_files_are_named(tmp_path: Path, suffix: str, change, message: str) -> None:
    make_shard(tmp_path / "s", [3, 2])
    damage(tmp_path / f"s{suffix}", change)
    with pytest.raises(DataError, match=message):
        Shard(tmp_path / "s")


TRUNCATED = """
import os, sys
from megatron_coca.data import Blend, DataError, Loader, Packing, Shard
prefix, suffix, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
shard = Shard(prefix)
packing = Packing(reset_attention_mask=True, reset_position_ids=True)
with Loader(Blend([shard], [1.0], 16, seed=1), 8, 8, 0, 1, None, packing, num_workers=0) as loader:
    loader.micro_batches(0)
    os.truncate(prefix + suffix, size)
    for read in (lambda: loader.micro_batches(1), lambda: shard.document(0), lambda: shard.tokens(0, 5)):
        try:
            read()
        except DataError as error:
            print(error)
"""


@pytest.mark.parametrize(("suffix", "size"), [(".bin", 0), (".idx", 5000)])
def test_a_shard_truncated_while_it_is_read_is_named(tmp_path: Path, suffix: str, size: int) -> None:
    """In a process of its own, which SIGBUS would end."""
    make_shard(tmp_path / "s", [10] * 3000)
    before = (tmp_path / f"s{suffix}").stat().st_size
    line = [sys.executable, "-c", TRUNCATED, str(tmp_path / "s"), suffix, str(size)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    message = f"{tmp_path / 's'}{suffix}: has {size} bytes, and had {before} when it was opened"
    assert [told.startswith(message) for told in done.stdout.splitlines()] == [True] * 3


MANY = """
import sys
from megatron_coca.data import DataError, Shard
from megatron_coca.support.program import allow_open_files
allow_open_files()
try:
    shards = [Shard(sys.argv[1]) for _ in range(512)]
    print(len(shards), int(shards[-1].tokens(0, 1)[0]))
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [("-Sn 256", "512 7"), ("-n 256", "too many open files; raise the limit of this shell with `ulimit -n 65536`")],
)
def test_512_shards_under_a_small_limit_of_open_files(tmp_path: Path, limit: str, said: str) -> None:
    """The soft limit is raised; of the hard one an error says how."""
    prefix = tmp_path / "s"
    make_shard(prefix, [40], first=7)
    command = ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", sys.executable, "-c", MANY, str(prefix)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said in finished.stdout


def test_missing_shard_and_positions_outside_are_errors(tmp_path: Path, shards: list[Shard]) -> None:
    with pytest.raises(DataError, match=r"none\.bin: no such file"):
        Shard(tmp_path / "none")
    with pytest.raises(DataError, match="lie outside its 933 tokens"):
        shards[1].tokens(930, 4)
    with pytest.raises(DataError, match="no document 2; the shard has 2"):
        shards[1].document(2)


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
        ([1.0], 16, "one weight per shard"),
        ([1.0, 0.0], 16, "must be positive"),
        ([1.0, float("nan")], 16, "must be positive"),
        ([1.0, 1.0], 933, r"code: 933 tokens do not fill a sample of seq_length \+ 1 = 934"),
        ([1.0, 1.0], 0, "seq_length must be at least 1"),
    ],
)
def test_impossible_blends_are_refused(
    shards: list[Shard], weights: list[float], seq_length: int, message: str
) -> None:
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
        deadline = time.monotonic() + 10
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


@pytest.mark.parametrize(("arguments", "message"), [((10, 4, 0, 1), "10 does not divide"), ((8, 4, 2, 2), "Rank 2")])
def test_impossible_batches_are_refused(shards: list[Shard], arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Loader(Blend(shards, [3, 1], 16, seed=5), *arguments)
