"""Texts for a tokenizer: from everywhere in a corpus, none held out, about as many as asked for."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron_coca.data import CorpusSource, DataError, Rules, SourceSpec
from megatron_coca.data.preparation import preparation_plan
from megatron_coca.data.preparation.preparation_plan import split_of, training_texts
from megatron_coca.data.readers.files import FileReader


def write(path: Path, count: int, length: int = 100) -> Path:
    rows = ({"text": f"{path.stem} {i:05} ".ljust(length, "x"), "key": f"{path.stem}{i}"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_equal_share_of_every_source_from_all_its_files(tmp_path: Path) -> None:
    large = [write(tmp_path / f"large{number}.jsonl", 2000) for number in range(3)]
    sources = [
        CorpusSource(SourceSpec("large", large)),
        CorpusSource(SourceSpec("small", [write(tmp_path / "small.jsonl", 900)])),
    ]
    texts = list(training_texts(sources, Rules(test_fraction=0.2), 60_000))
    by_file = {path.stem: sum(text.startswith(path.stem) for text in texts) for path in [*large, Path("small")]}
    assert all(95 <= by_file[path.stem] <= 105 for path in large) and 295 <= by_file["small"] <= 305, by_file
    firsts = [int(text.split()[1]) for text in texts if text.startswith("large1")]
    assert min(firsts) < 300 and max(firsts) > 1500


def test_nothing_that_is_held_out(tmp_path: Path) -> None:
    rules = Rules(valid_fraction=0.2, test_fraction=0.3)
    source = CorpusSource(SourceSpec("s", [write(tmp_path / "s.jsonl", 400)]))
    texts = list(training_texts([source], rules, 10**7))
    keys = [text.split()[0] + str(int(text.split()[1])) for text in texts]
    assert sorted(keys) == sorted(key for i in range(400) if split_of(key := f"s{i}", rules) == "train")
    with pytest.raises(DataError, match="all documents are held out"):
        list(training_texts([CorpusSource(source.spec, split="test")], rules, 10**7))


@pytest.mark.parametrize("compress", [bytes, zstandard.ZstdCompressor().compress])
def test_the_share_is_filled_from_the_whole_file_whatever_the_compression(
    tmp_path: Path, compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation_plan, "open_reader", lambda spec: FileReader(spec, block=20_000))
    plain, chosen = tmp_path / "s.jsonl", random.Random(0)
    rows = ({"text": f"s {i:05} {chosen.randbytes(460).hex()}"} for i in range(3000))  # hardly compressible
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain.with_suffix(".zst").write_bytes(compress(plain.read_bytes()))
    path = plain.with_suffix(".zst") if compress is not bytes else plain
    texts = list(training_texts([CorpusSource(SourceSpec("s", [path]))], Rules(), 500_000))
    numbers = [int(text.split()[1]) for text in texts]
    assert 500_000 <= sum(map(len, texts)) <= 501_000
    assert min(numbers) < 200 and max(numbers) > 2800 and 1200 < sum(numbers) / len(numbers) < 1800


def test_a_few_long_documents_fill_the_share(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", 10, length=50_000)
    assert len(list(training_texts([CorpusSource(SourceSpec("s", [path]))], Rules(), 10_000))) == 1


def test_damage_is_an_error(tmp_path: Path) -> None:
    whole = write(tmp_path / "s.jsonl", 3000)
    damaged = tmp_path / "d.jsonl.gz"
    damaged.write_bytes(gzip.compress(whole.read_bytes())[:-100])
    source = CorpusSource(SourceSpec("s", [damaged, whole]))
    with pytest.raises(DataError, match=r"d\.jsonl\.gz"):
        list(training_texts([source], Rules(), 10_000))


def test_a_large_corpus_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_plan, "PARSED_BYTES", 40_000)
    monkeypatch.setattr(preparation_plan, "open_reader", lambda spec: FileReader(spec, block=2000))
    parsed = []
    documents = FileReader.documents

    def counting(self, chunk, problems):
        for document in documents(self, chunk, problems):
            parsed.append(document)
            yield document

    monkeypatch.setattr(FileReader, "documents", counting)
    source = CorpusSource(SourceSpec("s", [write(tmp_path / "s.jsonl", 4000)]))
    texts = list(training_texts([source], Rules(), 5_000))
    assert 30 <= len(texts) <= 60 and 150 <= len(parsed) <= 700


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', "garbage\n"])
def test_a_source_without_a_document_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"c: no usable document in .*c\.jsonl"):
        list(training_texts([CorpusSource(SourceSpec("c", [tmp_path / "c.jsonl"]))], Rules(), 1000))
