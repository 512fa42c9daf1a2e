"""The command prepare: options that are zero, faulty records, start and end tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron_coca.commands import generate, prepare
from megatron_coca.config import load_config
from megatron_coca.data import DataError, Shard, load_saved_tokenizer, load_tokenizer
from megatron_coca.evaluation.documents import collect_documents
from megatron_coca.training.corpus import open_corpus


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


DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 4, "train_iters": 1}


def tokenizer_folder(folder: Path, *special: str) -> Path:
    """A Hugging Face folder with a byte-level BPE that has these special tokens, from id 0 on."""
    folder.mkdir(exist_ok=True)
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["text"], vocab_size=270, special_tokens=list(special), show_progress=False)
    model.save(str(folder / "tokenizer.json"))
    return folder


def hf(folder: Path) -> list[str]:
    return ["--tokenizer-type", "HFTokenizer", "--vocab-file", str(folder / "tokenizer.json")]


TOKEN = {"__type": "AddedToken", "content": DEEPSEEK, "lstrip": False, "normalized": True}


@pytest.mark.parametrize(
    ("special", "files", "end"),
    [
        (["<end>", "</s>"], {"tokenizer_config.json": {"eos_token": "<end>"}}, 0),
        (["</s>", "<end>"], {"tokenizer_config.json": {"eos_token": "<end>"}}, 1),
        (["<bos>", DEEPSEEK], {"tokenizer_config.json": {"eos_token": TOKEN}}, 1),
        (["<bos>", DEEPSEEK], {}, 1),
        (["</s>", "<end>"], {"special_tokens_map.json": {"eos_token": {"content": "<end>"}}}, 1),
        (["</s>", "<a>", "<b>"], {"generation_config.json": {"eos_token_id": [2, 1]}}, 2),
        (["</s>", "<end>"], {"tokenizer_config.json": {"eos_token": "<of another model>"}}, 0),
        (["</s>"], {"tokenizer_config.json": ["</s>"], "generation_config.json": {"eos_token_id": 999}}, 0),
    ],
)
def test_documents_end_with_the_end_of_text_of_the_tokenizer(
    tmp_path: Path, special: list[str], files: dict[str, Any], end: int
) -> None:
    """The shards, the tokenizer saved with them and that of a run agree on it."""
    folder = tokenizer_folder(tmp_path / "model", *special)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", f"a text{special[end]}"), *hf(folder)))
    tokens = Shard(tmp_path / "out" / "s_train").document(0).tolist()
    assert tokens[-1] == end and end not in tokens[:-1]
    assert load_saved_tokenizer(tmp_path / "out").eod == manifest_of(tmp_path / "out")["tokenizer"]["eod"] == end
    corpus = open_corpus(load_config([tmp_path / "out" / "data.yml"], SHAPE))
    assert corpus.tokenizer is not None and corpus.tokenizer.eod == end


def test_an_end_token_can_be_named_and_has_a_remedy(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "model", "<stop>")
    given = options(tmp_path, write_texts(tmp_path / "s.jsonl", "a text"), *hf(folder))
    with pytest.raises(DataError, match="no symbol that ends a document.* --end-token"):
        prepare.main(given)
    prepare.main([*given, "--end-token", "<stop>"])
    assert Shard(tmp_path / "out" / "s_train").document(0)[-1] == 0
    assert open_corpus(load_config([tmp_path / "out" / "data.yml"], SHAPE)).tokenizer is not None


def test_a_start_token_begins_every_text(tmp_path: Path) -> None:
    """It is recorded, the tokenizer keeps it, and evaluation puts it once."""
    folder = tokenizer_folder(tmp_path / "model", "<s>", "</s>")
    path = write_texts(tmp_path / "s.jsonl", "one", "<s>two")
    prepare.main(options(tmp_path, path, *hf(folder), "--start-token", "<s>"))
    prefix, plain = tmp_path / "out" / "s_train", load_tokenizer("HFTokenizer", folder)
    documents = [[0, *plain.encode(text), 1] for text in ("one", "<s>two")]
    shard = Shard(prefix)
    assert [shard.document(number).tolist() for number in range(2)] == documents
    record, saved = manifest_of(tmp_path / "out"), load_saved_tokenizer(tmp_path / "out")
    assert record["settings"]["start_token"] == "<s>" and record["tokenizer"]["start"] == 0 == saved.trained_start
    assert saved.fingerprint == plain.fingerprint and plain.trained_start is None
    for source in (prefix, path):
        found = collect_documents([str(source)], saved, saved.vocab_size, 4, start=0)
        assert [row.tolist() for row in found.arrays] == [document[:4] for document in documents]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--start-token", "<bos>"], "has no symbol '<bos>'"),
        (["--start-token", "t"], "'t' cannot begin documents"),
        (["--start-token", "<s>", "--messages", "all"], "start_token has no effect on chats"),
    ],
)
def test_start_tokens_that_cannot_be_used(tmp_path: Path, given: list[str], message: str) -> None:
    folder = tokenizer_folder(tmp_path / "model", "<s>", "</s>")
    with pytest.raises(DataError, match=message):
        prepare.main(options(tmp_path, write_texts(tmp_path / "s.jsonl", "text"), *hf(folder), *given))


def test_the_end_of_a_trained_tokenizer_begins_texts_too(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "s.jsonl", *(f"a text with the number {number}" for number in range(200)))
    given = ["--input", f"s={path}", "--output", str(tmp_path / "out"), "--workers", "0", "--train-tokenizer", "300"]
    with pytest.raises(DataError, match="end_token has no effect"):
        prepare.main([*given, "--end-token", "</s>"])
    prepare.main([*given, "--start-token", "<eod>"])
    eod = load_saved_tokenizer(tmp_path / "out").eod
    tokens = Shard(tmp_path / "out" / "s_train").document(0)
    assert tokens[0] == tokens[-1] == eod
    assert manifest_of(tmp_path / "out")["settings"]["start_token"] == "<eod>"
