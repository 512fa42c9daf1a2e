"""The tokenizer of a Hugging Face folder: its type, its end of text, and the reasons for having none."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.torch import load_file, save_file

from megatron_coca.checkpoints import native, open_checkpoint
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.checkpoints.tokenizer import read_tokenizer
from megatron_coca.data import load_saved_tokenizer, load_tokenizer, train_sentencepiece
from tests.checkpoint_files import beginning_tokenizer

AUTHORS = Path(__file__).parents[2] / "golden" / "authors" / "coca_llama"
LINES = [f"def function_{i}(self):\n    return the value of the argument {i}" for i in range(300)]
ENDS, OTHER, PLAIN = "<|endoftext|>", "<|other|>", "return"
ROWS = 400


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind: a SentencePiece model, GPT-2's pair, tokenizer.json with two symbols."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(LINES, 330, folder / "tokenizer.model")
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(LINES, vocab_size=330, special_tokens=[ENDS, OTHER], show_progress=False)
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    unended = tokenizers.ByteLevelBPETokenizer()
    unended.train_from_iterator(LINES, vocab_size=330, special_tokens=[OTHER], show_progress=False)
    unended.save(str(folder / "unended.json"))
    return folder


def folder_with(files: Path, folder: Path, names: tuple[str, ...], **configs: Any) -> Path:
    """A folder with some of the files, and JSON files by their names without the ending."""
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(files / name, folder / name)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


ALL = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (ALL, "HFTokenizer"),
        (ALL[1:], "SPMTokenizer"),
        (ALL[2:], "GPT2BPETokenizer"),
    ],
)
def test_which_kind_it_becomes(names: tuple[str, ...], kind: str, files: Path, tmp_path: Path) -> None:
    found = read_tokenizer(folder_with(files, tmp_path, names, config={}), ROWS)
    assert found.tokenizer is not None and found.note is None
    expected = load_tokenizer(kind, files)
    assert found.tokenizer.fingerprint == expected.fingerprint
    assert found.tokenizer.encode(LINES[0]) == expected.encode(LINES[0])


SAID: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ENDS),
    "the usual one": ({"config": {"eos_token_id": 0}}, ENDS),
    "another": ({"config": {"eos_token_id": 1}}, OTHER),
    "several": ({"config": {"eos_token_id": [1, 0]}}, OTHER),
    "for generation only": ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 1}}, OTHER),
    "by name": ({"tokenizer_config": {"eos_token": OTHER}}, OTHER),
    "by name with options": ({"tokenizer_config": {"eos_token": {"content": OTHER, "lstrip": False}}}, OTHER),
    "config first": ({"config": {"eos_token_id": 0}, "tokenizer_config": {"eos_token": OTHER}}, ENDS),
    "outside, then by name": ({"config": {"eos_token_id": 999}, "tokenizer_config": {"eos_token": OTHER}}, OTHER),
}


@pytest.mark.parametrize("said", SAID)
def test_the_end_of_a_text(said: str, files: Path, tmp_path: Path) -> None:
    configs, symbol = SAID[said]
    found = read_tokenizer(folder_with(files, tmp_path, ("tokenizer.json",), **configs), ROWS)
    assert found.tokenizer is not None and found.note is None
    assert found.tokenizer.piece(found.tokenizer.eod) == symbol


def test_a_word_cannot_end_documents(files: Path, tmp_path: Path) -> None:
    found = read_tokenizer(folder_with(files, tmp_path, ALL[:1], tokenizer_config={"eos_token": PLAIN}), ROWS)
    assert found.tokenizer is not None and found.tokenizer.piece(found.tokenizer.eod) == ENDS
    assert found.note is not None
    assert "its end-of-text token cannot be used" in found.note and "using '<|endoftext|>'" in found.note


def test_a_vocabulary_whose_end_only_the_folder_knows(files: Path, tmp_path: Path) -> None:
    shutil.copyfile(files / "unended.json", tmp_path / "tokenizer.json")
    none = read_tokenizer(tmp_path, ROWS)
    assert none.tokenizer is None and none.note is not None and "to end documents" in none.note
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": OTHER}))
    found = read_tokenizer(tmp_path, ROWS)
    assert found.tokenizer is not None and found.tokenizer.eod == 0


def test_one_that_cannot_be_read_makes_room_for_the_next(files: Path, tmp_path: Path) -> None:
    folder = folder_with(files, tmp_path, ("tokenizer.model",))
    (folder / "tokenizer.json").write_text("{}")
    found = read_tokenizer(folder, ROWS)
    assert found.tokenizer is not None and found.tokenizer.tokenizer_type == "SPMTokenizer"


@pytest.mark.parametrize(
    ("names", "rows", "content", "message"),
    [
        ((), ROWS, {}, "no tokenizer is used: .* has none"),
        (("vocab.json",), ROWS, {}, "has none"),
        (("tokenizer.json",), 300, {}, "tokenizer.json: has 330 ids, .*300 rows"),
        ((), ROWS, {"tokenizer": {}}, "HFTokenizer cannot open this file"),
    ],
)
def test_why_there_is_none(
    names: tuple[str, ...], rows: int, content: dict[str, Any], message: str, files: Path, tmp_path: Path
) -> None:
    found = read_tokenizer(folder_with(files, tmp_path, names, **content), rows)
    assert found.tokenizer is None and found.note is not None
    assert re.search(message, found.note)


def enlarged(folder: Path, **config: Any) -> Path:
    """The authors' model with rows for all of the tokenizer's ids."""
    folder.mkdir()
    weights = load_file(AUTHORS / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name].repeat(4, 1)
    save_file(weights, folder / "model.safetensors")
    keys = json.loads((AUTHORS / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(keys | {"vocab_size": 4 * keys["vocab_size"]} | config))
    return folder


@pytest.mark.parametrize(("end", "named"), [(0, True), (1, False)])
@pytest.mark.parametrize("names", [ALL[:1], ALL[2:]])
def test_the_checkpoint_carries_and_names_it(
    names: tuple[str, ...], end: int, named: bool, files: Path, tmp_path: Path
) -> None:
    """A key cannot say that another symbol than the usual one ends documents: then none names the files."""
    source = folder_with(files, enlarged(tmp_path / "source", eos_token_id=end), names)
    done = import_checkpoint(source, tmp_path / "save")
    opened = open_checkpoint(done.folder)
    assert done.tokenizer_note is None and opened.tokenizer_folder == done.folder / "global_step0" / native.TOKENIZER
    tokenizer, data = load_saved_tokenizer(opened.tokenizer_folder), opened.trained.data
    assert tokenizer.eod == end and data.tokenizer_type == tokenizer.tokenizer_type
    assert (data.vocab_file is not None) == named
    if named:
        again = load_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file)
        assert again.fingerprint == tokenizer.fingerprint


def test_one_of_another_model_is_left_out(files: Path, tmp_path: Path) -> None:
    source = shutil.copytree(AUTHORS, tmp_path / "source")
    done = import_checkpoint(folder_with(files, source, ALL[:1]), tmp_path / "save")
    assert done.tokenizer_note is not None and "has 330 ids, but the embedding has 97 rows" in done.tokenizer_note
    assert open_checkpoint(done.folder).tokenizer_folder is None


def test_one_that_loses_text_is_noted(tmp_path: Path) -> None:
    """Words of letters, without a decoder."""
    shutil.copytree(AUTHORS, tmp_path / "theirs")
    beginning_tokenizer(tmp_path / "theirs")
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", {"pos_emb": "coca"})
    note = "the tokenizer loses text: 100% of 8 "
    assert done.tokenizer_note is not None and done.tokenizer_note.startswith(note)
