"""Tokenizers: exactness, the separator, saving, and errors."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers import load_saved_tokenizer, load_tokenizer
from megatron_coca.data.tokenizers.kinds import PROBES, Tokenizer, agree, first_difference
from megatron_coca.data.tokenizers.sentencepiece_kind import ModelSettings, without_dummy_prefix
from megatron_coca.data.tokenizers.training import train_sentencepiece
from tests.checkpoint_files import beginning_tokenizer
from tests.tokenizer_files import train_bpe

AWKWARD = [
    "", " ", "  leading and trailing  ", "\ttabs\t\tand\n\n\nnewlines\r\n",
    "naïve 日本語 😀 e\u0301 \u00a0\u2028\x85\x0c",
    "\u2581literal\u2581 \u2581\u2581", "NUL \x00 and \ufeffBOM \uffff", "<eod> <unk> <s></s> <0x41> <|endoftext|>",
    "<|endoftext|><|endoftext|>", "    def f(x):\n\t    return x\n", "\u2581begins <eod>\u2581 <e od>\u2581",
    " " * 61 + "x  ",
    "the value of  a function \u2581 the <eod> value\n" * 200, "no-space-at-all" * 500, " " * 5000,
]  # fmt: skip


LINES = [f"def function_{i}(self):\n    return the value of the argument {i}" for i in range(300)]
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


def sentencepiece_model(path: Path, model_type: str = "bpe", **settings: object) -> Path:
    """A model as LLaMA's: a space in front of every text, byte fallback, <s> and </s>."""
    with path.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(line for text in LINES for line in text.split("\n")),
            model_writer=writer, model_type=model_type, vocab_size=330, minloglevel=2, **(IDENTITY | settings),
        )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of each kind: a SentencePiece model, GPT-2's pair, tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(LINES, 330, folder / "tokenizer.model")
    sentencepiece_model(folder / "llama.model")
    train_bpe(LINES, 340, folder / "neox.json")
    model = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|padding|>"]
    model.train_from_iterator(LINES, vocab_size=330, special_tokens=special, show_progress=False)
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


ARGUMENTS = {
    "SPMTokenizer": ("SPMTokenizer", "tokenizer.model"),
    "LLaMA": ("SPMTokenizer", "llama.model"),
    "HFTokenizer": ("HFTokenizer", "tokenizer.json"),
    "NeoX": ("HFTokenizer", "neox.json"),
    "HFGPT2Tokenizer": ("HFGPT2Tokenizer", ""),
    "GPT2BPETokenizer": ("GPT2BPETokenizer", "vocab.json", "merges.txt"),
    "CharLevelTokenizer": ("CharLevelTokenizer",),
}


def opened(folder: Path, name: str) -> Tokenizer:
    kind, *files = ARGUMENTS[name]
    return load_tokenizer(kind, *(folder / file for file in files))


@pytest.fixture(params=ARGUMENTS)
def tokenizer(request: pytest.FixtureRequest, folder: Path) -> Tokenizer:
    return opened(folder, request.param)


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
    with pytest.raises(DataError, match=f"token id {tokenizer.vocab_size}: outside"):
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


def test_a_piece_is_readable(tokenizer: Tokenizer) -> None:
    assert "the" in "".join(tokenizer.piece(i) for i in tokenizer.encode("of the argument"))


def test_settings_of_a_sentencepiece_file(folder: Path, tmp_path: Path) -> None:
    llama = (folder / "llama.model").read_bytes()
    assert ModelSettings.read(llama) == ModelSettings(is_bpe=True, dummy_prefix=True)
    assert ModelSettings.read(without_dummy_prefix(llama)) == ModelSettings(True, False)
    other = sentencepiece_model(tmp_path / "m.model", "unigram", normalization_rule_name="nfkc").read_bytes()
    assert ModelSettings.read(other) == ModelSettings(is_bpe=False, dummy_prefix=True)
    assert ModelSettings.read(b"") == ModelSettings(False, True), "the defaults of the format"


def test_llamas_symbols_are_not_read_from_text(folder: Path) -> None:
    llama = opened(folder, "LLaMA")
    assert llama.piece(llama.eod) == "</s>"
    assert not {1, 2} & set(llama.encode("a <s> b</s>"))
    assert llama.piece(llama.encode("the")[0]).startswith("\u2581")


def test_neox_shape(folder: Path) -> None:
    """Ids as in GPT-NeoX-20B; runs of spaces are tokens though special tokens are not read from text."""
    neox = opened(folder, "NeoX")
    assert (neox.eod, neox.piece(1), neox.vocab_size) == (0, "<|padding|>", 340)
    assert [neox.piece(i) for i in range(340 - 23, 340)] == [" " * n for n in range(24, 1, -1)]
    assert neox.encode(" " * 24 + "the" + " " * 3)[:: len(neox.encode("the")) + 1] == [340 - 23, 338]
    assert not {0, 1} & set(neox.encode("<|endoftext|> <|padding|>"))
    added = json.loads((folder / "neox.json").read_text())["added_tokens"]
    assert [token["special"] for token in added] == [True, True] + [False] * 23


def test_a_file_may_not_shorten_pad_or_vary_texts(folder: Path, tmp_path: Path) -> None:
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.enable_truncation(4)
    model.enable_padding(length=50)
    model.model.dropout = 0.5
    model.save(str(tmp_path / "tokenizer.json"))
    text = "the value of the argument of the function"
    ids = load_tokenizer("HFTokenizer", tmp_path).encode(text)
    assert ids == opened(folder, "HFTokenizer").encode(text)


def test_vocab_size_covers_ids_behind_a_gap(tmp_path: Path) -> None:
    words = tokenizers.models.WordLevel({"<|endoftext|>": 0, "a": 7}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("HFTokenizer", tmp_path)
    assert (tokenizer.vocab_size, tokenizer.decode(tokenizer.encode("a"))) == (8, "a")


def test_what_a_library_puts_before_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    begun = beginning_tokenizer(tmp_path)
    assert begun.start == begun.token("<bos>") == 0 and begun.encode("ab") == [67, 68]
    assert tokenizer.start is None
    with pytest.raises(DataError, match="no symbol '<start>'"):
        begun.token("<start>")


@pytest.mark.parametrize(
    ("symbols", "eod"),
    [(["<pad>", "<eos>", "<bos>", "</s>"], "<eos>"), (["<BOS_TOKEN>", "<EOS_TOKEN>"], "<EOS_TOKEN>")],
    ids=["Gemma", "Cohere"],
)
def test_the_separator_of_a_family(symbols: list[str], eod: str, tmp_path: Path) -> None:
    """Gemma's vocabulary has `</s>` as a tag of HTML."""
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "a"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("HFTokenizer", tmp_path)
    assert tokenizer.piece(tokenizer.eod) == eod


@pytest.mark.parametrize("kind", ["SPMTokenizer", "HFTokenizer", "HFGPT2Tokenizer", "GPT2BPETokenizer"])
def test_a_folder_stands_for_its_files(folder: Path, kind: str) -> None:
    assert load_tokenizer(kind, folder).fingerprint == opened(folder, kind).fingerprint


def test_another_separator_is_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    usual = opened(folder, "HFTokenizer")
    other = load_tokenizer("HFTokenizer", folder, eod="<|padding|>")
    assert (usual.eod, other.eod) == (0, 1) and usual.fingerprint != other.fingerprint
    other.save(tmp_path)
    again = load_saved_tokenizer(tmp_path)
    assert (again.eod, again.fingerprint) == (1, other.fingerprint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SPMTokenzier", "x"), "tokenizer_type: unknown type 'SPMTokenzier'; supported types: SPMTokenizer"),
        (("SPMTokenizer", None), "vocab_file: is required for SPMTokenizer"),
        (("SPMTokenizer", "absent.model"), r"absent\.model: cannot be read"),
        (("GPT2BPETokenizer", "vocab.json"), "merge_file: is required for GPT2BPETokenizer"),
        (("SPMTokenizer", "tokenizer.json"), r"tokenizer\.json: SPMTokenizer cannot open this file"),
        (("HFTokenizer", "tokenizer.model"), r"tokenizer\.model: HFTokenizer cannot open this file"),
        (("HFTokenizer", "bare.json"), "to end documents"),
        (("TiktokenTokenizer", None), "TiktokenTokenizer is not supported; .*tokenizer_type to HFTokenizer"),
    ],
)
def test_bad_arguments_are_errors_with_the_remedy(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "bare.json"))
    kind, *files = arguments
    with pytest.raises(DataError, match=message):
        load_tokenizer(kind, *(name and folder / name for name in files))


@pytest.mark.parametrize(
    ("kind", "eod", "message"),
    [
        ("HFTokenizer", "<none>", "the vocabulary has none of <none>"),
        ("HFTokenizer", "t", "end_token: 't' is not a special token"),
        ("CharLevelTokenizer", "<eod>", "has no symbols, because id 0 ends documents"),
    ],
)
def test_a_separator_that_cannot_be_is_an_error(folder: Path, kind: str, eod: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(kind, folder, eod=eod)


def test_a_folder_without_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer("HFTokenizer", tmp_path)


def test_a_changed_or_absent_saved_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_saved_tokenizer(tmp_path)
    train_sentencepiece(["some text to learn from"] * 9, 280, tmp_path / "one.model").save(tmp_path)
    train_sentencepiece(["quite other words, these"] * 9, 280, tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match="have changed since"):
        load_saved_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{}"])
@pytest.mark.parametrize("name", ["SPMTokenizer", "HFTokenizer", "GPT2BPETokenizer"])
def test_a_damaged_file_is_told_as_changed(folder: Path, tmp_path: Path, name: str, content: bytes) -> None:
    opened(folder, name).save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_type.json").read_text())
    (tmp_path / saved["vocab_file"]).write_bytes(content)
    with pytest.raises(DataError, match="have changed since they were saved"):
        load_saved_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["a\ud800b", "the value " * 900 + "\udfff", "\udc80\u2581"])
def test_half_a_character_is_an_error(tokenizer: Tokenizer, text: str) -> None:
    place = next(number for number, letter in enumerate(text) if 0xD800 <= ord(letter) < 0xE000)
    with pytest.raises(DataError, match=rf"lone surrogate, U\+D[8CF][0-9A-F]+, at character {place}, "):
        tokenizer.encode(text)


def test_small_vocabularies_that_agree_on_the_probes_are_told_apart(tmp_path: Path) -> None:
    """None of their merges applies to a probe."""
    one, other = (train_bpe([f"{word} " * 9] * 9, 287, tmp_path / f"{word}.json") for word in ("zqxjkv", "vkjxqz"))
    assert all(one.encode(text) == other.encode(text) for text in PROBES)
    assert one.encode("zqxjkv") != other.encode("zqxjkv")
    assert first_difference(one, other) is not None and not agree(one, other)


def test_rules_of_texts_are_found_saved_and_taken_from_a_saved_copy(tmp_path: Path) -> None:
    """The list of generation_config.json comes before that of config.json; ids beyond the vocabulary end nothing."""
    made = train_bpe(["the sea was calm"] * 9, 284, tmp_path / "tokenizer.json")
    assert load_tokenizer("HFTokenizer", tmp_path).ends == (0,)
    settings = {"bos_token": {"content": "<|padding|>"}, "eos_token": "<|endoftext|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 9]}))
    assert load_tokenizer("HFTokenizer", tmp_path).ends == (0, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0, 9999, True]}))
    found = load_tokenizer("HFTokenizer", tmp_path)
    assert (found.ends, found.bos, found.start, found.fingerprint) == ((0, 7), 1, 1, made.fingerprint)
    assert found.encode_prompt("a<|padding|>", add=True) == [1, *made.encode("a"), 1]
    assert found.encode("a<|padding|>") == made.encode("a<|padding|>")
    found.save(tmp_path / "saved")
    copies = load_saved_tokenizer(tmp_path / "saved"), load_tokenizer("HFTokenizer", tmp_path / "saved")
    assert [copy.rules for copy in copies] == [found.rules] * 2
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert load_tokenizer("HFTokenizer", tmp_path / "other.json").ends == (0,), "the folder may be anybody's"


@pytest.mark.parametrize(
    "settings", [{"clean_up_tokenization_spaces": True}, {"model_max_length": 4}, {"add_eos_token": True}], ids=str
)
def test_settings_of_transformers_do_not_change_texts(
    settings: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    """Such as the rule that removes spaces before punctuation, which the configurations of Llama 3 switch on."""
    shutil.copyfile(folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    ours, plain = load_tokenizer("HFTokenizer", tmp_path), load_tokenizer("HFTokenizer", folder / "tokenizer.json")
    text = "x != y , it 's 'quoted' ' . ? don 't"
    assert list(ours.encode(text)) == list(plain.encode(text))
    assert ours.decode(ours.encode(text)) == text


def test_merges_of_pieces_with_spaces(tmp_path: Path) -> None:
    """They are pairs in a list, because a text with one space between them would be ambiguous."""
    pieces = {piece: number for number, piece in enumerate(["<|endoftext|>", "a", " ", "  ", "    "])}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=[(" ", " "), ("  ", "  ")]))
    model.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"][0] == [" ", " "]
    assert list(load_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").encode("a    a")) == [1, 4, 1]
