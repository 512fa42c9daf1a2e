"""Sources with few documents have training text, and held-out text if their texts are long."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.commands import prepare as command
from megatron_coca.data import Shard, SourceSpec, load_tokenizer
from megatron_coca.data.preparation.manifest import read_manifest
from megatron_coca.data.preparation.preparation_plan import CorpusSource, Execution, Rules
from megatron_coca.data.preparation.run import prepare
from megatron_coca.data.preparation.text_cuts import LEAST, cut_text

CHARACTERS = load_tokenizer("CharLevelTokenizer")
LINES = "".join(f"line {number} of a long text\n" for number in range(5000))


def prepared(folder: Path, rules: Rules, *paths: Path, **spec: Any) -> dict[str, list[str]]:
    """Prepare the files. Return the texts of each split."""
    source = CorpusSource(SourceSpec("s", paths, **spec))
    prepare([source], folder / "out", CHARACTERS, rules, Execution(progress=False))
    (entry,) = read_manifest(folder / "out" / "manifest.json")["sources"]
    texts = dict[str, list[str]]()
    for split in ("train", "valid", "test"):
        shard = Shard(folder / "out" / f"s_{split}") if entry[split]["documents"] else None
        texts[split] = [CHARACTERS.decode(shard.document(n)) for n in range(shard.documents)] if shard else []
    return texts


@pytest.mark.parametrize("fractions", [(0.01, 0.01), (0.2, 0.1), (0.0, 0.05), (0.05, 0.0), (0.5, 0.49)])
def test_a_text_is_cut_after_lines(fractions: tuple[float, float]) -> None:
    parts = cut_text(LINES, *fractions)
    assert "".join(part for part, _ in parts) == LINES and all(part.endswith("\n") for part, _ in parts)
    wanted = [split for split, fraction in zip(("train", "valid", "test"), (1, *fractions), strict=True) if fraction]
    assert [split for _, split in parts] == wanted
    for part, split in parts[1:]:
        expected = max(LEAST, len(LINES) * dict(zip(("valid", "test"), fractions, strict=True))[split])
        assert abs(len(part) - expected) < 100


@pytest.mark.parametrize("text", ["x" * 5000, "word " * 1000, "é" * 999, "a\n" * 600])
def test_other_texts_are_cut_without_loss(text: str) -> None:
    parts = cut_text(text, 0.01, 0.01)
    assert "".join(part for part, _ in parts) == text and parts[0][1] == "train"
    assert [split for _, split in parts] == (["train"] if len(text) < 1000 else ["train", "valid", "test"])


def test_one_text_file_has_every_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    texts = prepared(tmp_path, Rules(), tmp_path / "a.txt")
    assert [len(texts[split]) for split in texts] == [1, 1, 1]
    assert texts["train"][0] + texts["valid"][0] + texts["test"][0] == LINES


def test_the_hash_decides_if_it_leaves_no_split_empty(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(12)]
    for number, path in enumerate(paths):
        path.write_text(f"{number} {LINES}")
    texts = prepared(tmp_path, Rules(0.3, 0.3), *paths)
    assert sum(map(len, texts.values())) == 12 and all(texts.values())


@pytest.mark.parametrize("with_key", [True, False])
def test_not_all_documents_are_held_out(tmp_path: Path, with_key: bool) -> None:
    """Short texts and texts with keys are not cut."""
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"{number} {LINES if with_key else 'short'}"} for number in range(4)]
    rows = [row | {"key": f"book {number // 2}"} for number, row in enumerate(rows)] if with_key else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = prepared(tmp_path, Rules(0.49, 0.5), path)
    assert texts["train"] and sum(map(len, texts.values())) == 4
    if with_key:
        assert len(texts["train"]) == 2, "both pages of a book"
    only_test = tmp_path / "only"
    only_test.mkdir()
    assert not prepared(only_test, Rules(0, 1), path)["train"], "as requested"


@pytest.mark.parametrize(("given", "documents"), [([], 3), (["--documents", "line"], 5000)])
def test_a_newcomer_gets_a_configuration_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], documents: int
) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    options = ["--input", f"a={tmp_path / 'a.txt'}", "--train-tokenizer", "300", "--workers", "0", *given]
    command.main([*options, "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "megatron-coca train configs/quickstart/roformer_coca.yml" in printed
    assert ("use --documents line" in printed) == (not given) and "has no documents" not in printed
    (entry,) = read_manifest(tmp_path / "out" / "manifest.json")["sources"]
    assert sum(entry[split]["documents"] for split in ("train", "valid", "test")) == documents
