"""Shards against their manifest: every fault is found and told, and nothing sound is."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_coca import cli
from megatron_coca.commands import inspect as inspect_data
from megatron_coca.data import Shard, inspection
from megatron_coca.data.errors import DataError
from megatron_coca.data.inspection import find_shards
from megatron_coca.data.shards import HEADER, ShardWriter
from megatron_coca.data.verify import verify_shards


@pytest.fixture
def shards(corpus: Path, tmp_path: Path) -> Path:
    """A prepared folder, to be damaged."""
    return shutil.copytree(corpus, tmp_path / "shards")


def other_byte(folder: Path) -> None:
    """A letter becomes another one: size, index and vocabulary are as they were."""
    with (folder / "words_train.bin").open("r+b") as stream:
        stream.seek(400)
        old = stream.read(1)
        stream.seek(400)
        stream.write(b"z" if old != b"z" else b"y")


def large_id(folder: Path) -> None:
    with (folder / "words_train.bin").open("r+b") as stream:
        stream.seek(401)
        stream.write(b"\x7f")


def moved_end(folder: Path) -> None:
    """The first document is one token longer, the second one shorter: the index is sound in itself."""
    path = folder / "words_train.idx"
    content = bytearray(path.read_bytes())
    count = HEADER.unpack_from(content)[3]
    lengths = np.frombuffer(content, "<i4", count, HEADER.size)
    pointers = np.frombuffer(content, "<i8", count, HEADER.size + 4 * count)
    lengths[0] += 1
    lengths[1] -= 1
    pointers[1] += 2
    path.write_bytes(content)
    Shard(folder / "words_train")


def fewer_documents(folder: Path) -> None:
    shard = Shard(folder / "words_train")
    documents = [shard.document(number) for number in range(shard.documents)]
    writer = ShardWriter(folder / "words_train", 512)
    for document in [np.concatenate(documents[:2]), *documents[2:]]:
        writer.add(document)
    writer.finish()


def other_manifest(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    content["tokenizer"]["fingerprint"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(content))


def other_description(folder: Path) -> None:
    content = json.loads((folder / "tokenizer_type.json").read_text())
    (folder / "tokenizer_type.json").write_text(json.dumps(content | {"fingerprint": "0" * 64}))


FAULTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "nothing": (lambda folder: None, []),
    "one byte": (other_byte, ["words_train.bin: the content has changed"]),
    "an id": (large_id, ["content has changed"]),
    "the index": (moved_end, ["1 documents do not end with the separator 0"]),
    "two in one": (fewer_documents, ["documents, but manifest.json records"]),
    "cut": (
        lambda folder: (folder / "words_test.bin").write_bytes(b"12"),
        ["words_test.bin: has 2 bytes, but its index records"],
    ),
    "absent": (lambda folder: (folder / "words_test.idx").unlink(), ["words_test.idx: no such file"]),
    "tokenizer": (other_manifest, ["shards: the tokenizer differs from the one recorded in manifest.json"]),
    "description": (other_description, ["have changed since"]),
}


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_told(shards: Path, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "BLOCK_TOKENS", 5 * at_once)
    monkeypatch.setattr(inspection, "BLOCK_DOCUMENTS", at_once)
    damage, messages = FAULTS[name]
    damage(shards)
    faults = [fault for found in verify_shards(find_shards([shards])) for fault in found.faults]
    assert len(faults) == len(messages), faults
    assert all(message in fault for message, fault in zip(messages, faults, strict=True)), faults


def test_all_faults_of_all_shards_and_status_1(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_data.main(["verify", str(shards)]) == 0
    assert "no fault was found" in capsys.readouterr().out
    other_byte(shards)
    other_description(shards)
    (shards / "words_test.bin").unlink()
    out = shards / "facts.json"
    assert inspect_data.main(["verify", str(shards), "--json", str(out)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("FAULT ") == 3 and "words_test.bin: no such file" in shown
    assert sum(len(found["faults"]) for found in json.loads(out.read_text())) == 3


def test_a_shard_without_a_manifest_is_checked_as_far_as_that_goes(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(shards / f"words_train{suffix}", tmp_path / "own")
    moved_end(tmp_path / "own")  # its documents need not end in anything
    (found,) = verify_shards(find_shards([tmp_path / "own"]))
    assert (found.content, found.faults) == (False, [])
    (found,) = verify_shards(find_shards([shards / "words_train"]))
    assert found.content


def test_a_damaged_manifest_is_an_error_of_the_input(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="manifest.json: cannot be read"):
        find_shards([shards])
    assert cli.main(["inspect", "verify", str(shards)]) == 2


def test_what_the_manifest_does_not_vouch_for_is_told(shards: Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(shards / f"words_train{suffix}", shards / f"extra{suffix}")
    record = json.loads((shards / "manifest.json").read_text())
    record["sources"][0]["test"]["sha256"] = None
    (shards / "manifest.json").write_text(json.dumps(record))
    faults = [fault for found in verify_shards(find_shards([shards])) for fault in found.faults]
    assert len(faults) == 2 and "extra: not listed in the manifest.json" in faults[0]
    assert "words_test: manifest.json has no SHA-256" in faults[1]


def test_what_is_recorded_is_the_hash_of_the_file(shards: Path) -> None:
    for entry in find_shards([shards]):
        assert entry.sha256 == hashlib.sha256(Path(f"{entry.prefix}.bin").read_bytes()).hexdigest()
