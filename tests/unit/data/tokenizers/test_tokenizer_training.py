"""Training a SentencePiece tokenizer: the same texts give the same file, and errors name the remedy."""

import string
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megatron_coca.data import DataError, load_tokenizer, train_sentencepiece

TEXTS = [text[:2000] + "\n    naïve 日本" for _, text in sorted(topics.items())][:60]


def test_training_is_repeatable_and_exact(tmp_path: Path) -> None:
    first, again = (
        train_sentencepiece(TEXTS, 500, tmp_path / "a"),
        train_sentencepiece(iter(TEXTS), 500, tmp_path / "b"),
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (first.vocab_size, first.fingerprint) == (500, again.fingerprint)
    assert load_tokenizer("SPMTokenizer", tmp_path / "a").encode(TEXTS[3]) == first.encode(TEXTS[3])
    for text in [*TEXTS, "Ünknown \x00 \u2581 <eod><|endoftext|> 😀\n\n"]:
        assert first.decode(first.encode(text)) == text
    assert sum(len(first.encode(text)) for text in TEXTS) < sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("texts", "vocab_size", "remedy"),
    [
        (TEXTS[:2], 100, "choose a larger vocab_size"),
        ([string.printable] * 9, 280, "choose a larger vocab_size"),
        (TEXTS[:2], 50000, "choose a smaller vocab_size, or add text"),
        (["", " \n\n"], 400, "add text"),
    ],
)
def test_a_vocabulary_that_the_text_does_not_fit_is_an_error(
    tmp_path: Path, texts: list[str], vocab_size: int, remedy: str
) -> None:
    with pytest.raises(DataError, match=f"cannot train a vocabulary of {vocab_size} pieces .*{remedy}"):
        train_sentencepiece(texts, vocab_size, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("error", [DataError("corpus.jsonl: damaged"), KeyboardInterrupt("stop"), OSError("gone")])
def test_an_error_of_the_texts_is_raised_as_it_is(tmp_path: Path, error: BaseException) -> None:
    def texts() -> Iterator[str]:
        yield TEXTS[0]
        raise error

    with pytest.raises(type(error)) as caught:
        train_sentencepiece(texts(), 400, tmp_path / "m")
    assert caught.value is error and not (tmp_path / "m").exists()


def test_lines_longer_than_the_trainer_takes_are_cut(tmp_path: Path) -> None:
    words = " ".join(f"{TEXTS[1][i % 40]}word{i % 50}" for i in range(200_000))
    assert len(words) > 1 << 20
    tokenizer = train_sentencepiece([words], 320, tmp_path / "m")
    assert len(tokenizer.encode("word")) < 4
