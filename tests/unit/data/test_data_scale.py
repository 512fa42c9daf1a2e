"""Nothing of the size of the corpus or of the run is stored: not in memory, and not on the disk, where it could go
stale.
"""

import hashlib
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_coca.data import Blend, DataError, Shard
from megatron_coca.data.shards import ShardWriter
from tests.patience import patience
from tests.unit.data.shard_files import make_shard


def digest(blend: Blend, first: int = 0) -> str:
    return hashlib.sha256(blend.batch(np.arange(first, first + 256)).tobytes()).hexdigest()


CHANGES = {
    "weight": {"weights": [3.0, 2.0]},
    "seed": {"seed": 6},
    "length": {"seq_length": 15},
    "split": {"last": 3},
    "input": {"first": 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_nothing_is_kept_that_a_change_could_leave_stale(tmp_path: Path, change: dict[str, Any]) -> None:
    """The order is computed, not cached: every change shows at once, its undoing too, and nothing is written."""

    def read(first: int = 0, last: int = 4, weights=(3.0, 1.0), seq_length: int = 16, seed: int = 5) -> str:
        text = make_shard(tmp_path / "text", [400, 300, 200, 2000], first=first).part(0, last)
        return digest(Blend([text, make_shard(tmp_path / "code", [900])], weights, seq_length, seed))

    before = read()
    files = {path.name for path in tmp_path.iterdir()}
    assert read(**change) != before
    assert read() == before
    assert {path.name for path in tmp_path.iterdir()} == files


READER = """
import hashlib, sys
import numpy as np
from megatron_coca.data import Blend, Shard
blend = Blend([Shard(prefix) for prefix in sys.argv[1:]], [3, 1], 16, seed=5)
print(hashlib.sha256(blend.batch(np.arange(256)).tobytes()).hexdigest())
"""


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    shards = [make_shard(tmp_path / "text", [100, 1, 57, 4000]), make_shard(tmp_path / "code", [900, 33])]
    command = [sys.executable, "-c", READER, *(str(shard.prefix) for shard in shards)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = {rank.communicate(timeout=patience(120))[0].strip() for rank in ranks}
    assert answers == {digest(Blend(shards, [3, 1], 16, seed=5))}


def sparse_shard(prefix: Path, documents: int, length: int) -> Shard:
    """A shard of zeros that takes no room on the disk, however long."""
    lengths = np.full(documents, length, dtype="<i4")
    pointers = np.arange(documents, dtype="<i8") * length * 2
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    index = [lengths, pointers, np.arange(documents + 1, dtype="<i8")]
    prefix.with_suffix(".idx").write_bytes(header + b"".join(part.tobytes() for part in index))
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(documents * length * 2)
    return Shard(prefix)


def test_places_beyond_two_gib_keep_their_numbers(tmp_path: Path) -> None:
    """Offsets in tokens and in bytes exceed 32 bits, in shards that are read and in an index that is written."""
    shard = sparse_shard(tmp_path / "read", 3, 2_000_000_000)
    with (tmp_path / "read.bin").open("r+b") as stream:
        stream.seek(-10, 2)
        stream.write(np.arange(1, 6, dtype="<u2").tobytes())
    assert shard.len_tokens == 6 * 10**9
    assert shard.tokens(shard.len_tokens - 7, 7).tolist() == [0, 0, 1, 2, 3, 4, 5]
    assert shard.windows(np.array([5 * 10**9, shard.len_tokens - 2]), 2).tolist() == [[0, 0], [4, 5]]
    writer = ShardWriter(tmp_path / "written", 60000)
    writer.extend(np.zeros(0, dtype=np.int64), np.full(3, 2_000_000_000))  # the index of a shard of 12 GB
    writer.finish()
    assert (tmp_path / "written.idx").read_bytes() == (tmp_path / "read.idx").read_bytes()


def peak_of_order(shard: Shard, samples: int) -> int:
    """Bytes that it takes at most to make a blend and find a batch at the end of its ``samples`` samples."""
    tracemalloc.start()
    try:
        blend = Blend([shard, shard], [3, 1], 2, seed=1)
        places = blend.by_source(np.arange(samples - 256, samples))
        assert sum(len(part.rows) for part in places) == 256 and blend.mixture(samples)[0].samples > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_order_of_ten_billion_samples_takes_no_more_memory(tmp_path: Path) -> None:
    small, large = sparse_shard(tmp_path / "small", 4, 10_000), sparse_shard(tmp_path / "large", 10, 2_000_000_000)
    assert large.len_tokens == 2 * 10**10
    assert peak_of_order(large, 10**10) < 1.1 * peak_of_order(small, 10**4)
    assert Blend([large], [1], 2, seed=1).mixture(10**10)[0].epochs == pytest.approx(1.0, abs=1e-6)


def test_opening_an_index_takes_no_memory_of_its_size(tmp_path: Path) -> None:
    documents = 2_000_000
    sparse_shard(tmp_path / "many", documents, 3)
    tracemalloc.start()
    try:
        shard = Shard(tmp_path / "many")
        begins = shard.document_begins(np.arange(0, 5_000_000, 40_000), 30)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert begins.sum() == 125 * 10
    assert shard.documents == documents and peak < documents * 20 / 3


@pytest.mark.parametrize("place", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 299_999])
@pytest.mark.parametrize("what", ["length", "pointer", "boundary"])
def test_one_wrong_entry_anywhere_is_found(tmp_path: Path, place: int, what: str) -> None:
    count = 300_000
    sparse_shard(tmp_path / "s", count, 3)
    kind, offset = {
        "length": ("<i4", 34 + 4 * place),
        "pointer": ("<i8", 34 + 4 * count + 8 * place),
        "boundary": ("<i8", 34 + 12 * count + 8 * place),
    }[what]
    entry = np.fromfile(tmp_path / "s.idx", dtype=kind, count=1, offset=offset)
    wrong = entry - 6 if what == "length" else entry + 2 * count
    with (tmp_path / "s.idx").open("r+b") as stream:
        stream.seek(offset)
        stream.write(wrong.tobytes())
    with pytest.raises(DataError, match="gaps|out of order|index records"):
        Shard(tmp_path / "s")
