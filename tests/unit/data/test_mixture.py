"""The share and the epochs of every source: table, warnings and metrics."""

from pathlib import Path

import numpy as np

from megatron_coca.data import Blend, Shard
from megatron_coca.data.mixture import mixture_figures, mixture_table, repeated_sources
from megatron_coca.data.shards import ShardWriter


def write_shard(prefix: Path, documents: int = 10) -> Path:
    writer = ShardWriter(prefix, 512)
    for number in range(documents):
        writer.add(np.full(20 + number, number))
    writer.finish()
    return prefix


def test_the_mixture_is_told_by_source(tmp_path: Path) -> None:
    shards = [Shard(write_shard(tmp_path / name, number)) for name, number in (("text", 40), ("code", 4))]
    shares = Blend(shards, [3, 1], 4, seed=0).mixture(1000)
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in mixture_table(shares).splitlines()]
    assert table[0] == ["source", "weight", "share", "samples", "tokens", "epochs"]
    assert table[2] == [str(tmp_path / "text"), "75.00%", "75.00%", "750", "3,000", f"{shares[0].epochs:.3g}"]
    assert table[3][:5] == [str(tmp_path / "code"), "25.00%", "25.00%", "250", "1,000"]
    assert shares[0].epochs < 4 < shares[1].epochs
    (line,) = repeated_sources(shares)
    assert line.startswith(f"{tmp_path / 'code'}: is read {shares[1].epochs:.1f} times")
    figures = mixture_figures(shares)
    assert figures["share/text"] == 0.75 and figures["epochs/code"] == shares[1].epochs


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    shards = [Shard(write_shard(tmp_path / name / "train")) for name in "ab"]
    figures = mixture_figures(Blend(shards, [1, 1], 4, seed=0).mixture(10))
    assert figures.keys() == {f"{kind}/{tmp_path / name / 'train'}" for kind in ("share", "epochs") for name in "ab"}
