"""Failures of the library tokenizers, also its panics, are errors with a place and a remedy."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.commands import prepare
from megatron_coca.data import DataError, load_tokenizer
from megatron_coca.data.tokenizers.huggingface_kind import LibraryError, library_errors_as_data_errors
from tests.tokenizer_files import train_bpe

SLOW = "a" * 40 + "b"
"""A text on which the pattern `SPLIT` takes more steps than the library permits."""
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def write_tokenizer(folder: Path, **changed: Any) -> Path:
    """Write a tokenizer.json with changed sections."""
    folder.mkdir(exist_ok=True)
    train_bpe(["some text"], 288, folder / "tokenizer.json")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= changed.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(content | changed))
    return folder


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_text_on_which_the_library_panics_is_a_faulty_record(workers: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", pre_tokenizer=SPLIT)
    texts = ["one", SLOW, "two"]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = ["--input", f"c={tmp_path / 'text.jsonl'}", "--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder)]
    given += ["--valid-fraction", "0", "--test-fraction", "0", "--workers", workers, "--output", str(tmp_path / "out")]
    prepare.main(given)
    (found,) = json.loads((tmp_path / "out" / "manifest.json").read_text())["inputs"]
    assert found["problems"] == {"text that the tokenizer cannot encode": 1}
    (named,) = found["problems_named"]
    assert "text.jsonl:2: text that the tokenizer cannot encode" in named and "retry-limit" in named


BAD: dict[str, dict[str, Any]] = {
    "a prefix": {"model": {"continuing_subword_prefix": "####"}},
    "a normalizer": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_on_which_the_library_panics_is_an_error(name: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, **BAD[name])
    with pytest.raises(DataError, match=r"HFTokenizer cannot open this file \(.*\); check that"):
        load_tokenizer("HFTokenizer", folder)


def test_every_call_reports_panics_and_plain_exceptions(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("HFTokenizer", write_tokenizer(tmp_path, pre_tokenizer=SPLIT))
    for call in (tokenizer.encode, tokenizer.encode_prompt, tokenizer.encode_rendered):
        with pytest.raises(DataError, match="retry-limit"):
            call(SLOW)
    assert tokenizer.decode(tokenizer.encode("text")) == "text", "the tokenizer still works"
    decoder = {"type": "Strip", "content": "a", "start": 99, "stop": 99}
    tokenizer = load_tokenizer("HFTokenizer", write_tokenizer(tmp_path, decoder=decoder))
    for each in (tokenizer.decode, tokenizer.spell):
        with pytest.raises(DataError, match="index out of bounds"):
            each(tokenizer.encode("a"))
    words = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "[UNK]"}
    tokenizer = load_tokenizer("HFTokenizer", write_tokenizer(tmp_path, model=words | {"merges": []}))
    with pytest.raises(DataError, match="Missing .UNK. token"):
        tokenizer.encode("text")


def test_the_error_of_a_worker_arrives() -> None:
    error = pickle.loads(pickle.dumps(LibraryError("a reason")))
    assert isinstance(error, LibraryError) and "failed (a reason); correct" in str(error)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_other_errors_pass(error: type[BaseException]) -> None:
    with pytest.raises(error), library_errors_as_data_errors():
        raise error
