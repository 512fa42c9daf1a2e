"""Hugging Face data sets: saved, in local folders, and the Hub without a network."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.data.errors import DataError
from megatron_coca.data.readers import open_reader
from megatron_coca.data.readers.huggingface_datasets import HuggingFaceReader
from megatron_coca.data.readers.source import Document, ReadingProblems, SourceSpec

datasets = pytest.importorskip("datasets")

TEXTS = [f"text {i} " * (i % 20 + 1) for i in range(400)]


def read(*paths: Path | str, **spec: Any) -> tuple[list[Document], ReadingProblems]:
    reader = open_reader(SourceSpec("h", paths, reader="huggingface", **spec))
    assert isinstance(reader, HuggingFaceReader)
    reader, problems = pickle.loads(pickle.dumps(reader)), ReadingProblems()
    found: list[Document] = []
    for unit in reader.units():
        chunks = list(reader.chunks(unit))
        assert sum(chunk.read for chunk in chunks) == unit.size and chunks == list(reader.chunks(unit))
        found += [d for chunk in pickle.loads(pickle.dumps(chunks)) for d in reader.documents(chunk, problems)]
    return found, problems


def saved(folder: Path, texts: list[str], **options: Any) -> Path:
    data = datasets.Dataset.from_dict({"body": texts, "key": [f"k{i}" for i in range(len(texts))]})
    data.save_to_disk(folder, **options)
    return folder


def test_a_saved_data_set_is_read_file_by_file(tmp_path: Path) -> None:
    folder = saved(tmp_path / "set", TEXTS, num_shards=3)
    (folder / "cache-0123.arrow").write_bytes((folder / "data-00000-of-00003.arrow").read_bytes())
    found, _ = read(folder, fields={"text": "body"})
    assert [d.text for d in found] == TEXTS and [d.key for d in found] == [f"k{i}" for i in range(400)]
    files = open_reader(SourceSpec("f", [folder], fields={"text": "body"}))
    assert [Path(unit.path).name for unit in files.units()] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    (folder / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match="data-00001"):
        read(folder, fields={"text": "body"})


def test_a_split_of_a_saved_data_set_is_chosen(tmp_path: Path) -> None:
    parts = {"train": TEXTS[:300], "validation": TEXTS[300:]}
    datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in parts.items()}).save_to_disk(tmp_path)
    assert [d.text for d in read(tmp_path)[0]] == TEXTS[:300]
    assert [d.text for d in read(tmp_path, options={"split": "validation"})[0]] == TEXTS[300:]
    with pytest.raises(DataError, match="no split 'test'; .*train, validation"):
        read(tmp_path, options={"split": "test"})
    files = open_reader(SourceSpec("f", [tmp_path]))
    with pytest.raises(DataError, match="the splits train, validation, .*reader huggingface"):
        files.units()
    assert len(open_reader(SourceSpec("f", [tmp_path / "validation"])).units()) == 1
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(files.units()) == 2, "a single split is not mixed with another"


@pytest.mark.parametrize("named", ["folder", "file"])
def test_local_files_are_streamed(tmp_path: Path, named: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in [*TEXTS[:250], " ", TEXTS[250]]))
    found, problems = read(tmp_path if named == "folder" else path)
    assert [d.text for d in found] == TEXTS[:251]
    assert problems.counts == {"empty text": 1} and ":251: " in problems.named[0]


def test_a_local_folder_that_changes_has_another_stamp(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    reader = HuggingFaceReader(SourceSpec("h", [tmp_path]))
    (before,) = reader.units()
    (tmp_path / "train.jsonl").write_text('{"text": "xy"}\n')
    assert reader.units()[0].stamp != before.stamp


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"options": {"split": "test"}}, "Bad split: test"),
        ({"fields": {"text": "content"}}, r"no column 'content', only \['text'\]"),
        ({"metadata": Path("m.jsonl")}, "huggingface does not use metadata.*reader repositories"),
        ({"documents": "line"}, "the reader huggingface does not use documents"),
        ({"options": {"splits": "test"}}, r"unknown options \['splits'\].*name, split, revision"),
    ],
)
def test_wrong_requests_are_errors(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=message):
        read(tmp_path, **spec)


@pytest.mark.parametrize("path", ["/no/such/folder", "./data", "data/of/mine", "c/nope.jsonl", "nope.parquet"])
def test_a_missing_folder_is_not_looked_for_at_the_hub(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a working tree may have a folder `data`
    with pytest.raises(DataError, match="no such file or folder"):
        read(path)


def test_the_hub_without_a_network_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    for name in ("owner/name", "name", "owner/name-v1.1", "owner/name.en"):
        with pytest.raises(DataError, match=rf"^{name}: cannot be read by datasets \(ConnectionError.*network"):
            read(name)


def test_the_hub_is_read_at_the_commit_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    class Info:
        sha = "0123abcd"

    def load(**arguments: Any) -> Any:
        asked.update(arguments)
        return datasets.Dataset.from_dict({"text": TEXTS, "image": TEXTS}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: Info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    found, _ = read("owner/name", options={"name": "en", "split": "train", "revision": "main"})
    assert [d.text for d in found] == TEXTS
    assert asked["path"] == "owner/name" and asked["revision"] == "0123abcd" and asked["name"] == "en"
