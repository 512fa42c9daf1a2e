"""Shards are written byte for byte as megatron-core does."""

from pathlib import Path

import numpy as np
import pytest

from megatron_coca.data import DataError, Shard
from megatron_coca.data.shards import ShardWriter

DOCUMENTS = [[3, 4, 5], [6], [], [7, 8], list(range(2, 9))]


def files(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 10) -> None:
    writer = ShardWriter(prefix, vocab_size)
    for document in documents:
        writer.add(document)
    writer.finish()


@pytest.mark.parametrize("vocab_size", [10, 65499, 65500])
def test_the_bytes_are_those_of_megatron_core(tmp_path: Path, vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16 if vocab_size < 65500 else np.int32)
    for document in DOCUMENTS:
        builder.add_document(np.array(document, dtype=np.int64), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write(tmp_path / "ours", DOCUMENTS, vocab_size)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_many_documents_at_once(tmp_path: Path) -> None:
    lengths = np.array([len(document) for document in DOCUMENTS], dtype=np.int32)
    writer = ShardWriter(tmp_path / "s", 10)
    writer.extend(np.concatenate([np.array(d, dtype=np.uint16) for d in DOCUMENTS]), lengths)
    writer.finish()
    write(tmp_path / "one_by_one", DOCUMENTS)
    assert files(tmp_path / "s") == files(tmp_path / "one_by_one")


@pytest.mark.parametrize("ids", [[10], [-1], [3, 99]])
def test_ids_outside_the_vocabulary_are_errors(tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(DataError, match="outside the vocabulary of 10"):
        ShardWriter(tmp_path / "s", 10).add(ids)


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    """A million documents: a list of their lengths would already take 36 MB."""
    import tracemalloc

    block = np.full(100_000, 7, dtype=np.uint16)
    writer = ShardWriter(tmp_path / "s", 10)
    tracemalloc.start()
    for _ in range(10):
        writer.extend(block, np.ones(100_000, dtype=np.int32))
    writer.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert Shard(tmp_path / "s").documents == 1_000_000
