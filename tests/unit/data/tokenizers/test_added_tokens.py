"""Tokens that were added to the vocabulary of a tokenizer.json later."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_coca.checkpoints.tokenizer import read_tokenizer
from megatron_coca.data import DataError, load_tokenizer
from megatron_coca.data.tokenizers.chat import ChatTemplate
from megatron_coca.data.tokenizers.chat_labels import encode_chat
from tests.tokenizer_files import train_bpe

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def write_tokenizer(folder: Path, *added: dict[str, Any], **changed: Any) -> int:
    """Write a tokenizer.json with further added tokens, and with changes to its end token. Return its size without
    them.
    """
    size = train_bpe(["some text"], 288, folder / "tokenizer.json").vocab_size
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][0] |= changed
    content["added_tokens"] += [ADDED | {"id": size + number} | token for number, token in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return size


def test_an_unused_token_without_a_row_is_no_error(tmp_path: Path) -> None:
    """Only texts with this token are."""
    size = write_tokenizer(tmp_path, {"content": "[PAD]"})
    tokenizer, note = read_tokenizer(tmp_path, size)
    assert tokenizer is not None and note is None and tokenizer.vocab_size == size + 1
    assert tokenizer.decode(tokenizer.encode("a [PAD]")) == "a [PAD]", "documents contain no special tokens"
    for encode in (tokenizer.encode_prompt, tokenizer.encode_rendered):
        assert encode("text")
        with pytest.raises(DataError, match=rf"token '\[PAD\]': has id {size}, but the embedding .* has {size} rows"):
            encode("a [PAD]")
    whole = read_tokenizer(tmp_path, size + 1).tokenizer
    assert whole is not None and whole.encode_prompt("[PAD]") == [size]
    assert read_tokenizer(tmp_path, 200).tokenizer is None, "the vocabulary itself does not fit"


def test_a_text_never_contains_the_end_token(tmp_path: Path) -> None:
    """Also if the file declares it as an ordinary token."""
    write_tokenizer(tmp_path, special=False)
    for end in (None, "<|endoftext|>"):
        tokenizer = load_tokenizer("HFTokenizer", tmp_path, eod=end)
        text = "one<|endoftext|>two"
        assert tokenizer.eod not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.eod in tokenizer.encode_prompt(text)


@pytest.mark.parametrize("kind", ["WordLevel", "Unigram"])
def test_a_text_with_an_ordinary_word_as_end_token_is_an_error(kind: str, tmp_path: Path) -> None:
    """In these vocabularies the name is a piece of text too. A document would end where its text has the word."""
    words = ["<unk>", "a", "b", "</s>"]
    vocabulary = {
        "WordLevel": {"vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"},
        "Unigram": {"vocab": [[word, -float(number)] for number, word in enumerate(words)], "unk_id": 0},
    }
    content = {"version": "1.0", "added_tokens": [], "model": {"type": kind} | vocabulary[kind]}
    if kind == "WordLevel":
        content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    else:
        content["added_tokens"] = [ADDED | {"id": 3, "content": "</s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer("HFTokenizer", tmp_path)
    assert tokenizer.eod == 3 and 3 not in tokenizer.encode("a b a")
    with pytest.raises(DataError, match="text: contains '</s>', an ordinary word.*leave"):
        tokenizer.encode("a </s> b")
    with pytest.raises(DataError, match=r"'</s>' is not a special token"):
        load_tokenizer("HFTokenizer", tmp_path, eod="</s>")


def test_white_space_that_a_token_takes_is_no_answer(tmp_path: Path) -> None:
    """Phi-3's tokens of roles take the white space after them."""
    size = write_tokenizer(tmp_path, {"content": "<|assistant|>", "rstrip": True})
    tokenizer = load_tokenizer("HFTokenizer", tmp_path)
    tokenizer.chat = ChatTemplate(
        "{% for m in messages %}<|assistant|>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", {}
    )
    record = {"messages": [{"role": "assistant", "content": "\n an answer"}], "tools": None}
    chat = encode_chat(tokenizer, record, "answers")
    assert chat.tokens[0] == size and not chat.counts[0] and chat.counts[1:].all()
