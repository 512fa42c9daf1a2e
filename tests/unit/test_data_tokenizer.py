"""Tokenizers: exactness, the separator, saving, and errors."""

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers

from megatron_coca.data import DataError, Tokenizer, load_saved_tokenizer, load_tokenizer, train_sentencepiece

AWKWARD = [
    "", " ", "  leading and trailing  ", "\ttabs\t\tand\n\n\nnewlines\r\n",
    "naïve 日本語 😀 e\u0301 \u00a0\u2028\x85\x0c",
    "\u2581literal\u2581 \u2581\u2581", "NUL \x00 and \ufeffBOM \uffff", "<eod> <unk> <s></s> <0x41> <|endoftext|>",
    "<|endoftext|><|endoftext|>", "    def f(x):\n\t    return x\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of each kind: a SentencePiece model, GPT-2's pair, tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = [f"def function_{i}(self):\n    return the value of the argument {i}" for i in range(300)]
    train_sentencepiece(lines, 330, folder / "tokenizer.model")
    model = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|padding|>"]
    model.train_from_iterator(lines, vocab_size=330, special_tokens=special, show_progress=False)
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


ARGUMENTS = {
    "SPMTokenizer": ("tokenizer.model",),
    "HFTokenizer": ("tokenizer.json",),
    "HFGPT2Tokenizer": ("",),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    "CharLevelTokenizer": (),
}


@pytest.fixture(params=ARGUMENTS)
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return load_tokenizer(request.param, *(folder / name for name in ARGUMENTS[request.param]))


@pytest.mark.parametrize("text", AWKWARD)
def test_any_text_comes_back_and_never_holds_the_separator(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode([tokenizer.eod, *ids, tokenizer.eod]) == text


def test_every_code_point_comes_back(tokenizer: Tokenizer) -> None:
    points = [chr(i) for i in range(0x3000) if not 0xD800 <= i < 0xE000]
    for begin in range(0, len(points), 256):
        text = "".join(points[begin : begin + 256])
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new")
    again = load_saved_tokenizer(tmp_path / "new")
    assert isinstance(again, Tokenizer)
    for name in ("tokenizer_type", "vocab_size", "eod", "fingerprint"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.encode(AWKWARD[3]) == tokenizer.encode(AWKWARD[3])


def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=f"Token id {tokenizer.vocab_size} is outside"):
        tokenizer.decode([tokenizer.vocab_size])


def test_fingerprint_is_the_hash_of_the_file(folder: Path) -> None:
    path = folder / "tokenizer.model"
    assert load_tokenizer("SPMTokenizer", path).fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()


def test_gpt2_pair_agrees_with_the_library(folder: Path) -> None:
    ours = load_tokenizer("GPT2BPETokenizer", folder / "vocab.json", folder / "merges.txt")
    theirs = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    text = "def function_1(self): the argument, naïve 日本\n\n  x"
    assert ours.encode(text) == theirs.encode(text).ids
    assert (
        load_tokenizer("HFGPT2Tokenizer", folder).vocab_size
        == json.loads((folder / "vocab.json").read_text()).__len__()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SPMTokenzier", "x"), "Unknown tokenizer_type 'SPMTokenzier'. Known are SPMTokenizer"),
        (("SPMTokenizer", None), "SPMTokenizer needs vocab_file"),
        (("SPMTokenizer", "absent.model"), r"absent\.model: cannot read the tokenizer"),
        (("GPT2BPETokenizer", "vocab.json"), "GPT2BPETokenizer needs merge_file"),
        (("SPMTokenizer", "tokenizer.json"), r"tokenizer\.json: not a file that SPMTokenizer can open"),
        (("HFTokenizer", "tokenizer.model"), r"tokenizer\.model: not a file that HFTokenizer can open"),
        (("HFTokenizer", "bare.json"), "has no symbol that ends a document"),
    ],
)
def test_bad_arguments_are_errors_with_the_remedy(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "bare.json"))
    kind, *files = arguments
    with pytest.raises(DataError, match=message):
        load_tokenizer(kind, *(name and folder / name for name in files))


def test_a_changed_or_absent_saved_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the tokenizer's description"):
        load_saved_tokenizer(tmp_path)
    train_sentencepiece(["some text to learn from"] * 9, 280, tmp_path / "one.model").save(tmp_path)
    train_sentencepiece(["quite other words, these"] * 9, 280, tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match="have changed since"):
        load_saved_tokenizer(tmp_path)


def test_training_on_too_little_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot train 5000 pieces"):
        train_sentencepiece(["too little"], 5000, tmp_path / "m.model")
    assert not (tmp_path / "m.model").exists()
