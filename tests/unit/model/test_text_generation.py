"""Text of generated tokens: by every kind of tokenizer, with stop strings, in batches of texts."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import load_config
from megatron_coca.data import Tokenizer, load_tokenizer
from megatron_coca.data.tokenizers.training import train_sentencepiece
from megatron_coca.model import Sampling
from megatron_coca.text_generation import Continuation, TextGenerator, load_generator
from tests.checkpoint_files import BYTES, TINY, talkative_model, write_checkpoint

TEXTS = [
    " the boat near the shore",
    "naïve 日本語の文章 😀👩‍👩‍👧 Füße",
    "\n\n  two  spaces\tand a tab ",
    "한국어 עברית 𝔘𝔫",
]
LINES = [f"the boat number {number} lay near the shore until morning" for number in range(200)]


@pytest.fixture(scope="module")
def tokenizers_by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Bytes, byte-level BPE, SentencePiece with and without a space in front, LLaMA's tokenizer.json."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(LINES, 300, folder / "plain.model")
    with (folder / "llama.model").open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES), model_writer=writer, model_type="bpe", vocab_size=300, minloglevel=2,
            normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True,
        )  # fmt: skip
    byte_level = tokenizers.ByteLevelBPETokenizer()
    byte_level.train_from_iterator(LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    byte_level.save(str(folder / "tokenizer.json"))
    llama = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    llama.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    llama.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    llama.train_from_iterator(
        LINES, tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "</s>", *fallback])
    )
    saved = json.loads(llama.to_str())
    saved["added_tokens"] = saved["added_tokens"][:2]  # special tokens would be left out of a text
    (folder / "llama.json").write_text(json.dumps(saved))
    kinds = {"plain.model": "SPMTokenizer", "llama.model": "SPMTokenizer", "tokenizer.json": "HFTokenizer"}
    kinds["llama.json"] = "HFTokenizer"
    return {"bytes": BYTES} | {name: load_tokenizer(kind, folder / name) for name, kind in kinds.items()}


def text_of(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *stops: str) -> tuple[str, str]:
    row = Continuation(tokenizer, prompt, stops)
    for token in ids:
        if row.finish == "length":
            row.push(token)
    return row.text, row.finish


@pytest.mark.parametrize("stops", [[], ["near", "re\n", "e shor!"]])
@pytest.mark.parametrize("text", TEXTS)
def test_the_settled_text_only_grows(text: str, stops: list[str]) -> None:
    row, shown = Continuation(BYTES, BYTES.encode("the sea"), stops), ""
    for token in BYTES.encode(text):
        if row.finish == "length":
            row.push(token)
        assert row.settled.startswith(shown) and row.text.startswith(row.settled)
        shown = row.settled
    assert "\ufffd" not in shown and not any(stop in shown for stop in stops)
    assert shown == row.text[: len(shown)] and len(row.text) - len(shown) < 7
    assert repr(row) == f"Continuation({row.text!r}, finish={row.finish!r}, tokens={len(row.tokens)})"


@pytest.mark.parametrize("name", ["bytes", "plain.model", "llama.model", "tokenizer.json", "llama.json"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_text_continues_the_prompt(tokenizers_by_name: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers_by_name[name]
    ids = tokenizer.encode("the sea" + text + "!")
    for size in (1, 2, 5):
        prompt = tokenizer.decode(ids[:size])
        if "\ufffd" not in prompt:
            found = prompt + text_of(tokenizer, ids[:size], ids[size:])[0]
            assert found == tokenizer.decode(ids) == "the sea" + text + "!"


def test_a_space_between_prompt_and_continuation_is_kept(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_name["llama.model"]
    ids = tokenizer.encode("the boat")
    size = len(tokenizer.encode("the"))
    assert text_of(tokenizer, ids[:size], ids[size:])[0] == " boat"


def test_bytes_that_are_no_character_are_kept() -> None:
    assert set(text_of(BYTES, [97], [0xE6, 0x97])[0]) == {"\ufffd"}
    assert text_of(BYTES, [97], [0xFF, 98])[0] == "\ufffdb"


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one\n\nQ: two", ("\n\nQ:",), ("one", "stop")),
        ("one\n\ntwo", ("\n\nQ:",), ("one\n\ntwo", "length")),
        ("abcabd", ("abd",), ("abc", "stop")),
        ("aaab", ("aab",), ("a", "stop")),
        ("x END y", ("y", "END"), ("x ", "stop")),
        ("ab", ("abc",), ("ab", "length")),
        ("日本語", ("本",), ("日", "stop")),
        ("stop", ("stop",), ("", "stop")),
    ],
)
def test_stop_strings_over_several_tokens(text: str, stops: tuple[str, ...], wanted: tuple[str, str]) -> None:
    """Each token is a byte."""
    assert text_of(BYTES, [97], BYTES.encode(text), *stops) == wanted


def test_a_stop_string_within_one_token(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_name["tokenizer.json"]
    ids = tokenizer.encode(" near the shore")
    assert len(ids) < 6
    assert text_of(tokenizer, tokenizer.encode("lay"), ids, "sho") == (" near the ", "stop")


def test_the_end_of_a_document_ends_the_text() -> None:
    row = Continuation(BYTES, [97], ("xyz",))
    for token in (98, ord("x"), BYTES.eod):
        row.push(token)
    assert (row.text, row.finish, row.tokens) == ("bx", "eod", [98, ord("x"), BYTES.eod])


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        Continuation(BYTES, [97], ("",))


KEYS = TINY | {"seed": 2}
WARM = Sampling(0.9, top_k=50, seed=1)


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    return TextGenerator(talkative_model(load_config([], KEYS)), BYTES)


PROMPTS = ["the sea", "a boat", "calm sea", "the sea", "x"]


def test_a_text_does_not_depend_on_the_others(generator: TextGenerator) -> None:
    rows = generator.complete(PROMPTS, 20, WARM)
    for prompt, row in zip(PROMPTS[:3], rows, strict=False):
        assert generator.complete([prompt], 20, WARM)[0].tokens == row.tokens
    assert generator.complete(PROMPTS, 20, WARM, tokens_per_batch=1)[3].tokens == rows[3].tokens
    assert rows[0].tokens != rows[3].tokens, "equal prompts have samples of their own"
    assert all(len(row.tokens) == 20 or row.finish == "eod" for row in rows)


def test_a_stop_string_ends_a_sample(generator: TextGenerator) -> None:
    (row,) = generator.complete(["the sea"], 30, WARM)
    stop = row.text[5:7]
    (stopped,) = generator.complete(["the sea"], 30, WARM, [stop])
    assert stopped.text == row.text[: row.text.index(stop)] and len(stopped.tokens) < len(row.tokens)


def test_an_empty_prompt_begins_a_document(generator: TextGenerator) -> None:
    (row,) = generator.complete([""], 5, WARM)
    assert 1 <= len(row.tokens) <= 5


def test_a_token_before_every_prompt(generator: TextGenerator) -> None:
    begun = TextGenerator(generator.model, BYTES, ord("#"))
    prompts = ["the sea", "", "#a boat"]  # the last one has it already
    rows, expected = begun.complete(prompts, 10, WARM), generator.complete(["#the sea", "#", "#a boat"], 10, WARM)
    assert [row.tokens for row in rows] == [row.tokens for row in expected]


def test_loading(tmp_path: Path) -> None:
    config = load_config([], KEYS)
    write_checkpoint(tmp_path / "run", config, talkative_model(config).state_dict())
    change: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    plain, extended = load_generator(tmp_path / "run"), load_generator(tmp_path / "run", change)
    prompt = "a prompt that is longer than sixteen bytes"
    texts = [each.complete([prompt], 20, dynamic_length="total")[0].tokens for each in (plain, extended)]
    assert texts[0] != texts[1]
    write_checkpoint(tmp_path / "bare", load_config([], KEYS | {"tokenizer_type": "HFTokenizer"}), tokenizer=None)
    with pytest.raises(CheckpointError, match=r"bare: .*prompts are text; set tokenizer_type"):
        load_generator(tmp_path / "bare")
