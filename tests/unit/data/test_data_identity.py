"""What a resumed run knows its data by, and how a difference is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_coca.data import Blend, Shard
from megatron_coca.data.identity import data_identity, differing_data
from megatron_coca.data.preparation.manifest import FORMAT
from megatron_coca.data.shards import ShardWriter, sampled_digest


def write(prefix: Path, lengths: list[int], first: int = 0, vocab_size: int = 512) -> Shard:
    prefix.parent.mkdir(exist_ok=True)
    writer = ShardWriter(prefix, vocab_size)
    for number, length in enumerate(lengths):
        writer.add((np.arange(length) + number + first) % 512)
    writer.finish()
    return Shard(prefix)


def describe(folder: Path, **digests: str) -> None:
    sources = [{"name": name, "train": {"prefix": name, "sha256": digest}} for name, digest in digests.items()]
    (folder / "manifest.json").write_text(json.dumps({"format": FORMAT, "sources": sources}))


def identity(*shards: Shard, weights: tuple[float, ...] = (3.0, 1.0)) -> dict[str, Any]:
    found = data_identity(Blend(shards, weights[: len(shards)], 16, seed=0)) | {"tokenizer": "a" * 64}
    return json.loads(json.dumps(found))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Shard, Shard]:
    return write(tmp_path / "text", [300, 400]), write(tmp_path / "code", [500])


def test_the_same_tokens_elsewhere_are_the_same_data(two: tuple[Shard, Shard], tmp_path: Path) -> None:
    moved = write(tmp_path / "new" / "name", [300, 400], vocab_size=70000)
    assert moved.dtype != two[0].dtype
    assert not differing_data(identity(*two), identity(moved, two[1]), ["name", "code"])
    assert sampled_digest(write(tmp_path / "long", [9, 300, 400]).part(1, 3)) != sampled_digest(two[0])
    assert sampled_digest(write(tmp_path / "long", [9, 300, 400], -1).part(1, 3)) == sampled_digest(two[0])


CHANGES = {
    "other tokens": ({"lengths": [300, 400], "first": 1}, ["content of b (saved ", "now "]),
    "other documents": ({"lengths": [299, 401]}, ["content of b (saved "]),
    "more documents": ({"lengths": [300, 200, 200]}, ["document count of b (saved 2, now 3)"]),
    "fewer tokens": ({"lengths": [300, 399]}, ["token count of b (saved 700, now 699)"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_told_once_by_its_source(two: tuple[Shard, Shard], tmp_path: Path, change: str) -> None:
    arguments, parts = CHANGES[change]
    other = write(tmp_path / "other", **arguments)
    (line,) = differing_data(identity(two[1], two[0]), identity(two[1], other), ["a", "b"])
    assert all(part in line for part in parts) and len(line) < 80


def test_a_token_between_the_samples_is_known_by_the_manifest(tmp_path: Path) -> None:
    shard = write(tmp_path / "s", [2_000_000])
    describe(tmp_path, s="1" * 64)
    before = identity(shard)
    tokens = np.memmap(tmp_path / "s.bin", dtype="<u2", mode="r+")
    tokens[7000] += 1
    assert identity(shard)["sampled"] == before["sampled"], "what no sample holds"
    describe(tmp_path, s="2" * 64)
    assert differing_data(before, identity(shard), ["s"]) == [
        "content of s (saved 111111111111, now 222222222222)",
    ]
    tokens[5] += 1
    describe(tmp_path, s="1" * 64)
    (line,) = differing_data(before, identity(shard), ["s"])
    assert line.startswith("content of s"), "replaced under its manifest"


def test_a_manifest_that_is_lost_or_of_something_else_is_no_difference(
    two: tuple[Shard, Shard], tmp_path: Path
) -> None:
    describe(tmp_path, text="1" * 64)
    before = identity(*two)
    assert before["sha256"] == ["1" * 64, None]
    for content in ("[1]", json.dumps({"format": 99}), None):
        (tmp_path / "manifest.json").unlink()
        if content is not None:
            (tmp_path / "manifest.json").write_text(content)
            assert identity(*two)["sha256"] == [None, None]
            assert not differing_data(before, identity(*two), ["text", "code"])


def test_checkpoints_of_earlier_versions_are_compared_by_what_they_have(two: tuple[Shard, Shard]) -> None:
    now = identity(*two)
    old = {"tokens": [700, 500], "weights": [3.0, 1.0], "tokenizer": "a" * 64}
    assert not differing_data(old, now, ["a", "b"])
    assert not differing_data(old | {"tokenizer": None}, now, ["a", "b"]), "named since"
    wrong = differing_data(old | {"tokens": [700, 5000], "weights": [3.0, 2.0]}, now, ["a", "b"])
    assert wrong == ["token count of b (saved 5,000, now 500)", "weight of b (saved 2.0, now 1.0)"]


def test_what_belongs_to_no_source(two: tuple[Shard, Shard]) -> None:
    now = identity(*two)
    assert differing_data(identity(two[0]), now, ["a", "b"]) == ["number of sources (saved 1, now 2)"]
    assert differing_data(now | {"tokenizer": "b" * 64}, now, ["a", "b"]) == [
        "tokenizer (saved bbbbbbbbbbbb, now aaaaaaaaaaaa)"
    ]
    assert differing_data(now, now | {"tokenizer": None}, ["a", "b"]) == ["tokenizer (saved aaaaaaaaaaaa, now none)"]
    (treatment,) = differing_data(now | {"documents": ["eod_mask_loss"]}, now, ["a", "b"])
    assert "documents" in treatment and "(saved eod_mask_loss, now as one text)" in treatment
