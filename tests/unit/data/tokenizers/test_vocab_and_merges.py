"""Folders with vocab.json and merges.txt have the ids of transformers, which reads other files for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints.tokenizer import read_tokenizer
from megatron_coca.data import DataError, load_tokenizer
from tests.tokenizer_files import train_bpe

TEXT = "It's 12345 o'CLOCK, DON'T (x+y)==67 \u00e9 e\u0301 \n\n  two   spaces"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def write_folder(folder: Path, **settings: Any) -> int:
    """Write the two files, and tokenizer_config.json with these settings if there are any. Return the size."""
    train_bpe([TEXT * 3, "12345 12345 67 67 don't"], 290, folder / "all.json")
    model = json.loads((folder / "all.json").read_text())["model"]
    (folder / "all.json").unlink()
    vocabulary = {token: number for number, token in enumerate(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(model["merges"]) + "\n")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(vocabulary)


def test_qwen2_divides_and_normalizes_texts_in_its_own_way(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    size = write_folder(tmp_path)
    added = {str(size): FLAGS | {"content": "<|endoftext|>"}, str(size + 1): FLAGS | {"content": "<|im_end|>"}}
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    del vocabulary["<|endoftext|>"], vocabulary["<|padding|>"]
    vocabulary = {token: number for number, token in enumerate(vocabulary)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    added = {str(len(vocabulary) + number): entry for number, entry in enumerate(added.values())}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = Qwen2Tokenizer.from_pretrained(tmp_path)
    for tokenizer in (load_tokenizer("HFTokenizer", tmp_path), read_tokenizer(tmp_path, len(vocabulary) + 2).tokenizer):
        assert tokenizer is not None and tokenizer.encode(TEXT) == theirs(TEXT).input_ids
        assert tokenizer.encode_prompt("a<|im_end|>") == theirs("a<|im_end|>").input_ids
        assert tokenizer.eod == len(vocabulary) + 1
    with pytest.raises(DataError, match="Qwen2Tokenizer, which divides .*; use HFTokenizer"):
        load_tokenizer("GPT2BPETokenizer", tmp_path)


def test_tokens_of_added_tokens_json(tmp_path: Path) -> None:
    """Phi 2 adds runs of spaces to GPT-2's vocabulary."""
    from transformers import AutoTokenizer

    size = write_folder(tmp_path, tokenizer_class="CodeGenTokenizer", eos_token="<|endoftext|>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"   ": size, "  ": size + 1}))
    tokenizer = read_tokenizer(tmp_path, size + 2).tokenizer
    assert tokenizer is not None and {size, size + 1} <= set(tokenizer.encode(TEXT))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi"}))
    assert tokenizer.encode(TEXT) == AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer("HFTokenizer", tmp_path / "saved").encode(TEXT) == tokenizer.encode(TEXT)


def test_gpt2s_own_files_are_as_before(tmp_path: Path) -> None:
    size = write_folder(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    found = read_tokenizer(tmp_path, size).tokenizer
    assert found is not None and found.tokenizer_type == "GPT2BPETokenizer"
    (tmp_path / "tokenizer_config.json").unlink()
    found = read_tokenizer(tmp_path, size).tokenizer
    assert found is not None and found.tokenizer_type == "GPT2BPETokenizer"


def test_gpt2s_own_files_as_a_tokenizer_json(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    write_folder(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    theirs = GPT2Tokenizer.from_pretrained(tmp_path)
    plain, built = (load_tokenizer(kind, tmp_path) for kind in ("GPT2BPETokenizer", "HFTokenizer"))
    assert built.encode(TEXT) == plain.encode(TEXT) == theirs(TEXT).input_ids
    assert (built.eod, built.vocab_size) == (plain.eod, plain.vocab_size)


def test_faults_are_named(tmp_path: Path) -> None:
    size = write_folder(tmp_path, tokenizer_class="NovelTokenizer")
    for kind in ("HFTokenizer", "GPT2BPETokenizer"):
        with pytest.raises(DataError, match=r"names NovelTokenizer, .*write its tokenizer\.json"):
            load_tokenizer(kind, tmp_path)
    note = read_tokenizer(tmp_path, size).note
    assert note is not None and "NovelTokenizer" in note
    write_folder(tmp_path, tokenizer_class="Qwen2Tokenizer")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": size + 5}))
    with pytest.raises(DataError, match=rf"the added token '<x>' has id {size + 5} instead of {size}"):
        load_tokenizer("HFTokenizer", tmp_path)
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(DataError, match="vocab.json and merges.txt cannot be read"):
        load_tokenizer("HFTokenizer", tmp_path)
