"""Shards: GPT-NeoX's bytes read and written, and the errors of damaged, missing and truncated files."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_coca.data import DataError, Shard
from megatron_coca.data.shards import ShardWriter
from tests.patience import patience
from tests.unit.data.shard_files import make_shard

ROOT = Path(__file__).parents[3]


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
        (".idx", lambda b: b[:20], r"\.idx: the header is truncated"),
        (".idx", lambda b: b[:-8], r"\.idx: truncated or in another format"),
        (".idx", lambda b: b[:17] + b"\x06" + b[18:], "dtype code 6"),
        (".idx", lambda b: b[:34] + struct.pack("<i", 2) + b[38:], "gaps or overlaps"),
        (".idx", lambda b: b[:-16] + struct.pack("<qq", 7, 2), "out of order"),
        (".bin", lambda b: b[:-2], r"\.bin: has 8 bytes, but its index records 10"),
        (".bin", lambda b: b + b"xx", r"\.bin: has 12 bytes, but"),
        (".bin", lambda b: b"", "contains no tokens"),
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
    done = subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    message = f"{tmp_path / 's'}{suffix}: the file was truncated from {before} to {size} bytes while it was in use"
    assert [told.startswith(message) for told in done.stdout.splitlines()] == [True] * 3


MANY = """
import sys
from megatron_coca.data import DataError, Shard
from megatron_coca.support.open_files import allow_open_files
allow_open_files()
try:
    shards = [Shard(sys.argv[1]) for _ in range(512)]
    print(len(shards), int(shards[-1].tokens(0, 1)[0]))
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [("-Sn 256", "512 7"), ("-n 256", "`ulimit -n 65536`")],
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
    with pytest.raises(DataError, match="are out of range; the shard has 933 tokens"):
        shards[1].tokens(930, 4)
    with pytest.raises(DataError, match="document 2 does not exist; the shard has 2 documents"):
        shards[1].document(2)
