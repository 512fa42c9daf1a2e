"""The built-in corpus: real, held out without overlap, made once."""

import ast
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from megatron_coca.data import Blend, DataError, Shard, ensure_builtin, load_tokenizer
from megatron_coca.data.builtin import SOURCES, WEIGHTS, docstrings, without_docstrings
from megatron_coca.data.preparation.manifest import read_manifest

SPLITS = ("train", "test")


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the shards, made by several processes that ask at once."""
    root = tmp_path_factory.mktemp("data")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        manifests = pool.starmap(ensure_builtin, [(root, 1024)] * 2)
    assert manifests == [root / "builtin/shards/manifest.json"] * 2
    assert sorted(p.name for p in root.iterdir()) == ["builtin"]
    return manifests[0].parent


@pytest.fixture(scope="module")
def documents(builtin: Path) -> dict[tuple[str, str], list[list[int]]]:
    """Token ids of every document by source and split, without the separator."""
    found = {}
    for source in SOURCES:
        for split in SPLITS:
            shard = Shard(builtin / f"{source}_{split}")
            found[source, split] = [shard.document(i)[:-1].tolist() for i in range(shard.documents)]
    return found


@pytest.mark.slow
def test_shards_hold_the_documents_exactly(builtin: Path, documents) -> None:
    tokenizer = load_tokenizer("SPMTokenizer", builtin.parent / "tokenizer.model")
    for source in SOURCES:
        lines = (builtin.parent / f"{source}.jsonl").read_text().splitlines()
        texts = {tokenizer.decode(ids) for split in SPLITS for ids in documents[source, split]}
        assert texts == {json.loads(line)["text"] for line in lines} and len(texts) == len(lines) > 300


@pytest.mark.slow
def test_sizes_and_long_documents(builtin: Path, documents) -> None:
    record = read_manifest(builtin / "manifest.json")
    assert [source["problems"] for source in record["inputs"]] == [{}, {}]
    for source in record["sources"]:
        assert source["train"]["tokens"] > 400_000
        assert sum(len(ids) >= 2048 for ids in documents[source["name"], "test"]) >= 5


@pytest.mark.slow
def test_a_package_is_wholly_in_train_or_wholly_held_out(builtin: Path, documents) -> None:
    tokenizer = load_tokenizer("SPMTokenizer", builtin.parent / "tokenizer.model")
    keys: dict[str, set[str]] = {split: set() for split in SPLITS}
    for source in SOURCES:
        lines = map(json.loads, (builtin.parent / f"{source}.jsonl").read_text().splitlines())
        by_text = {line["text"]: line["key"] for line in lines}
        for split in SPLITS:
            keys[split] |= {by_text[tokenizer.decode(ids)] for ids in documents[source, split]}
    assert keys["train"] and keys["test"] and not keys["train"] & keys["test"]


def grams(documents: list[list[int]], tokenizer, n: int = 13) -> set[int]:
    words = [tokenizer.decode(ids).split() for ids in documents]
    return {hash(tuple(w[i : i + n])) for w in words for i in range(len(w) - n + 1)}


# Share of the 13-grams (of words) of the held-out documents that occur in training. Measured with Python 3.11: text
# 0.7%, code 1.2%: licences, and modules written after one another, such as profile and cProfile.
OVERLAP = {"text": 0.02, "code": 0.02}


@pytest.mark.slow
def test_train_and_test_share_no_document_and_few_passages(builtin: Path, documents) -> None:
    tokenizer = load_tokenizer("SPMTokenizer", builtin.parent / "tokenizer.model")
    train = [ids for source in SOURCES for ids in documents[source, "train"]]
    known = grams(train, tokenizer)
    assert not {tuple(ids) for ids in train} & {tuple(ids) for s in SOURCES for ids in documents[s, "test"]}
    for source in SOURCES:
        test = grams(documents[source, "test"], tokenizer)
        assert len(test & known) / len(test) < OVERLAP[source]


@pytest.mark.slow
def test_text_and_code_share_few_passages(builtin: Path, documents) -> None:
    tokenizer = load_tokenizer("SPMTokenizer", builtin.parent / "tokenizer.model")
    text, code = (grams([i for s in SPLITS for i in documents[name, s]], tokenizer) for name in SOURCES)
    assert len(text & code) / len(text) < 0.002


@pytest.mark.slow
def test_the_papers_mixture(builtin: Path) -> None:
    blend = Blend([Shard(builtin / f"{source}_train") for source in SOURCES], WEIGHTS, 64, seed=1234)
    assert [share.fraction for share in blend.mixture(32000)] == pytest.approx(WEIGHTS, abs=1e-3)


@pytest.mark.slow
def test_a_complete_corpus_is_reused_and_another_is_an_error(builtin: Path, tmp_path: Path) -> None:
    root = builtin.parent.parent
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    assert ensure_builtin(root) == builtin / "manifest.json"
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before
    with pytest.raises(DataError, match="prepared with a vocabulary size of 1024, not 2048"):
        ensure_builtin(root, 2048)
    shutil.copytree(root / "builtin", tmp_path / "builtin")
    (tmp_path / "builtin/shards/manifest.json").write_text("{")
    with pytest.raises(DataError, match="manifest.json: cannot be read.*remove"):
        ensure_builtin(tmp_path)


SOURCE = '''"""Module, naïve."""
import os
class A:
    """Of A,
    two lines."""
    def only(self):
        "Only a docstring."
    def more(self): "Same line."; return "kept string"
    async def last(self):
        """Last."""  # a comment
        x = """not a docstring"""
'''


def test_docstrings_are_cut_out_and_the_rest_still_parses() -> None:
    tree = ast.parse(SOURCE)
    assert docstrings(tree).split("\n\n") == [
        "Module, naïve.", "Of A,\ntwo lines.", "Only a docstring.", "Same line.", "Last.",
    ]  # fmt: skip
    code = without_docstrings(SOURCE, tree)
    assert docstrings(ast.parse(code)) == ""
    assert 'return "kept string"' in code and '"""not a docstring"""' in code and "# a comment" in code
    assert "def only(self):\n        pass\n" in code
