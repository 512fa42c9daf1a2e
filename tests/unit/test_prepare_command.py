"""The command prepare: options that are zero, faulty records, start and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.commands import generate, prepare
from megatron_coca.data import DataError


def options(tmp_path: Path, path: Path, *given: str) -> list[str]:
    """Arguments for one source, without held-out documents, in this process."""
    base = ["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0"]
    base += [] if "--tokenizer-type" in given else ["--tokenizer-type", "CharLevelTokenizer"]
    held_out = [] if "--test-fraction" in given else ["--valid-fraction", "0", "--test-fraction", "0"]
    return [*base, *held_out, *given]


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def write_texts(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_fraction_of_zero_holds_nothing_out(tmp_path: Path) -> None:
    """Zero equals False in Python, and is an option that was given."""
    path = write_texts(tmp_path / "s.jsonl", *(f"text {number}" for number in range(400)))
    prepare.main(options(tmp_path, path))
    (entry,) = manifest_of(tmp_path / "out")["sources"]
    assert [entry[split]["documents"] for split in ("train", "valid", "test")] == [400, 0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-record-mib", "0"], "max_record_mib: .*greater than or equal to 1"),
        (["--train-tokenizer", "0"], "vocab_size: .*greater than 0"),
        (["--text-field", ""], "s.jsonl:1: missing field"),
        (["--output", ""], "Give the output folder"),
    ],
)
def test_a_zero_or_empty_value_is_not_ignored(tmp_path: Path, given: list[str], message: str) -> None:
    path = write_texts(tmp_path / "s.jsonl", "text")
    kind = [] if "--train-tokenizer" in given else ["--tokenizer-type", "CharLevelTokenizer"]
    with pytest.raises(DataError, match=message):
        prepare.main(["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0", *kind, *given])


@pytest.mark.parametrize("given", [["--valid-fraction", "0"], ["--max-record-mib", "0"], ["--text-field", ""]])
def test_a_zero_beside_a_recipe_is_an_error(tmp_path: Path, given: list[str]) -> None:
    with pytest.raises(DataError, match=f"{given[0]}: is for --input only"):
        prepare.main([str(tmp_path / "recipe.yml"), *given])


def test_no_piece_for_the_built_in_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--train-tokenizer 0: must be from 1"):
        prepare.main(["--builtin", "--output", str(tmp_path), "--train-tokenizer", "0"])


def test_an_empty_name_of_a_file_of_prompts_is_not_standard_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="^: cannot be read"):
        generate.main(["--checkpoint", ".", "--file", ""])
