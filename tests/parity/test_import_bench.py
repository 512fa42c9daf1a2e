"""The import benchmark: both ways write the same weights, and its sizes are those of the files."""

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools import bench_import

SMALL = {"HIDDEN": 64, "HEADS": 4, "INTERMEDIATE": 96, "VOCABULARY": 128, "LENGTH": 32}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(bench_import, name, value)


def test_both_ways_write_the_same(tmp_path: Path) -> None:
    facts, sources = bench_import.synthesise(tmp_path, 2, torch.float16, 50_000)
    assert facts["parameters"] == 2 * 128 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert facts["layer_bytes"] == 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64)
    sizes = [path.stat().st_size for path in sources["safetensors"].glob("*.safetensors")]
    assert len(sizes) == facts["shards"] > 3 and 0 < max(sizes) - facts["largest_shard_bytes"] < 4000
    found = []
    for kind, source in sources.items():
        bench_import.by_us(source, tmp_path / f"ours {kind}")
        found.append(load_file(tmp_path / f"ours {kind}" / "global_step0" / "model.safetensors"))
        bench_import.through_transformers(source, tmp_path / f"theirs {kind}")
        found.append(load_file(tmp_path / f"theirs {kind}" / "model.safetensors"))
    assert len(found[0]) == 15
    for other in found[1:]:
        assert other.keys() == found[0].keys() and all(torch.equal(other[name], found[0][name]) for name in other)


def test_a_measurement(tmp_path: Path) -> None:
    size = 100_000_000
    with mmap.mmap(-1, size) as taken:  # of the process's own freed memory none may be used again

        def way(source: Path, folder: Path) -> None:
            for page in range(0, size, mmap.PAGESIZE):
                taken[page] = 1

        found = bench_import.measured(way, tmp_path, tmp_path)
    assert found["peak_bytes"] > 0.9 * size and found["seconds"] > 0
