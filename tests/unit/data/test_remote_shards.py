"""Inputs and shards on an object store: the same documents, tokens and errors as from local files."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem

from megatron_coca.data import CorpusSource, DataError, Rules, Shard, SourceSpec, load_tokenizer, prepare
from megatron_coca.data.preparation.recipe import read_recipe
from megatron_coca.data.readers import open_reader, read_documents, remote
from megatron_coca.data.remote_shards import local_prefix
from megatron_coca.data.shards import sampled_digest
from megatron_coca.data.tokenizers.kinds import DESCRIPTION
from megatron_coca.support import remote_files

LINES = "".join(
    json.dumps({"text": f"document {number} " + "of words " * (number % 50)}) + "\n" for number in range(900)
)
URL = "memory://bucket/corpus"


def files() -> dict[str, bytes]:
    """A corpus of every kind of file, by name."""
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {number}" for number in range(300)]}), table)
    return {
        "a.jsonl.zst": zstandard.compress(LINES.encode()),
        "b.jsonl": LINES.replace("document", "page").encode(),
        "deep/c.parquet": table.getvalue(),
        "deep/d.txt": b"a text of its own",
        ".hidden.txt": b"not read",
        "deep/picture.png": b"not a text",
    }


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """An empty store, with short pauses."""
    monkeypatch.setattr(remote_files, "FIRST_PAUSE", 0.01)
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True) if system.store else None


@pytest.fixture
def both(store: MemoryFileSystem, tmp_path: Path) -> tuple[Path, str]:
    """The same corpus in a local folder and on the store."""
    for name, content in files().items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        store.pipe_file(f"/bucket/corpus/{name}", content)
    return tmp_path / "corpus", URL


def texts(path: Path | str) -> list[str]:
    return [document.text for document in read_documents(path)]


def test_documents_of_a_store_are_those_of_a_folder(both: tuple[Path, str]) -> None:
    local, url = both
    assert texts(url) == texts(local) and len(texts(url)) == 2101
    for name in ("a.jsonl.zst", "deep/c.parquet", "deep"):
        assert texts(f"{url}/{name}") == texts(local / name)
    readers = [open_reader(SourceSpec("corpus", [path])) for path in both]
    assert readers[1].unread() == {"hidden file": 1, "not a readable file (.png)": 1}
    sizes = [[unit.size for unit in reader.units()] for reader in readers]
    assert sizes[0] == sizes[1] and all(unit.path.startswith(url) for unit in readers[1].units())


def test_a_replaced_object_has_another_stamp(both: tuple[Path, str], store: MemoryFileSystem) -> None:
    reader = open_reader(SourceSpec("corpus", [f"{URL}/b.jsonl"]))
    (before,) = reader.units()
    store.pipe_file("/bucket/corpus/b.jsonl", LINES.replace("document", "side").encode())
    (after,) = reader.units()
    assert before.size == after.size and before.stamp != after.stamp
    reader.check_unchanged(after)
    with pytest.raises(DataError, match=f"{URL}/b.jsonl: changed while it was read"):
        reader.check_unchanged(before)


@pytest.mark.parametrize("failures", [2, 10_000])
def test_requests_that_fail_are_repeated(
    failures: int, both: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = both
    monkeypatch.setattr(remote, "TIMEOUT", 0.2)
    left, get = [failures], MemoryFileSystem.get_file

    def flaky(self: MemoryFileSystem, *arguments: object, **options: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("reset")
        get(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", flaky)
    monkeypatch.setattr(remote.DataFiles.__init__, "__defaults__", (0.2,))
    if failures == 2:
        assert texts(f"{url}/b.jsonl") == texts(local / "b.jsonl")
        return
    with pytest.raises(DataError, match=r"b\.jsonl cannot be downloaded for 0 s \(ConnectionError: reset\)") as raised:
        texts(f"{url}/b.jsonl")
    assert raised.value.status == 69


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://bucket/corpus/absent.txt", "no such object, and no readable file"),
        ("memory://bucket/corpus/deep/picture.png", r"unknown file type \(\.png\)"),
        ("nowhere://bucket/a.txt", "cannot be opened"),
    ],
)
def test_what_cannot_be_read_is_named(path: str, message: str, both: tuple[Path, str]) -> None:
    with pytest.raises(DataError, match=f"{path}.*{message}|{path.rpartition('/')[0]}.*{message}"):
        texts(path)


def test_a_recipe_takes_urls_and_their_patterns(both: tuple[Path, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"root: {URL}\ntokenizer_type: CharLevelTokenizer\noutput: out\n"
        f"sources:\n  some: {{paths: ['*.jsonl*', deep/c.parquet]}}\n  local: {{paths: [/a.txt]}}\n"
    )
    read = read_recipe(recipe)
    assert read.sources[0].spec.paths == [f"{URL}/{name}" for name in ("a.jsonl.zst", "b.jsonl", "deep/c.parquet")]
    recipe.write_text(recipe.read_text().replace("*.jsonl*", "*.xml"))
    with pytest.raises(DataError, match="no file matches this pattern"):
        read_recipe(recipe)


def prepared(paths: list[Path | str], output: Path) -> Path:
    sources = [CorpusSource(SourceSpec("corpus", paths))]
    return prepare(sources, output, load_tokenizer("CharLevelTokenizer"), Rules(0.1, 0.1)).parent


def test_shards_from_a_store_are_those_from_a_disk(both: tuple[Path, str], tmp_path: Path) -> None:
    one, two = (prepared([path], tmp_path / name) for path, name in zip(both, ("one", "two"), strict=True))
    for path in one.glob("*.*"):
        if path.suffix in (".bin", ".idx"):
            assert (two / path.name).read_bytes() == path.read_bytes(), path.name


def test_tokens_of_a_store_are_read_as_from_a_disk(
    both: tuple[Path, str], tmp_path: Path, store: MemoryFileSystem
) -> None:
    one = prepared([both[0]], tmp_path / "one")
    for path in one.iterdir():
        store.pipe_file(f"/bucket/out/{path.name}", path.read_bytes())
    local = Shard(one / "corpus_train")
    far = Shard(local_prefix("memory://bucket/out/corpus_train", tmp_path / "root"))
    assert (far.documents, far.len_tokens, far.dtype) == (local.documents, local.len_tokens, local.dtype)
    assert far.name == "memory://bucket/out/corpus_train" and local.name == str(one / "corpus_train")
    offsets = np.array([0, 17, 4000, local.len_tokens - 65])
    assert np.array_equal(far.windows(offsets, 65), local.windows(offsets, 65))
    assert np.array_equal(far.document(3), local.document(3)) and sampled_digest(far) == sampled_digest(local)
    assert np.array_equal(far.part(5, 90).tokens(3, 50), local.part(5, 90).tokens(3, 50))
    kept = {path.name for path in (tmp_path / "root/remote/memory/bucket/out").iterdir()}
    assert "corpus_train.bin" not in kept and {"corpus_train.idx", "manifest.json", DESCRIPTION} <= kept
    store.pipe_file("/bucket/out/corpus_train.bin", store.cat_file("/bucket/out/corpus_train.bin")[:1000])
    with pytest.raises(DataError, match="truncated while it was in use"):
        far.windows(offsets, 65)
    with pytest.raises(DataError, match=r"corpus_none\.idx: no such object"):
        local_prefix("memory://bucket/out/corpus_none", tmp_path / "root")
