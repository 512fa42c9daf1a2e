"""Training tokenizers: the same texts give the same file, and the tool measures on what it held out."""

import json
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from megatron_coca import cli
from megatron_coca.commands import train_tokenizer
from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers import load_saved_tokenizer, load_tokenizer
from megatron_coca.data.tokenizers.training import TRAINERS, HeldOut, measure, train_bpe, train_sentencepiece

TEXTS = [text[:2000] + "\n    naïve 日本" for _, text in sorted(topics.items())][:60]
KINDS = [(kind, model) for kind, models in TRAINERS.items() for model in models]


@pytest.mark.parametrize(("kind", "model"), KINDS)
def test_training_is_repeatable_and_exact(tmp_path: Path, kind: str, model: str) -> None:
    train = TRAINERS[kind][model]
    first, again = train(TEXTS, 500, tmp_path / "a"), train(iter(TEXTS), 500, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (first.vocab_size, first.fingerprint) == (500, again.fingerprint)
    assert load_tokenizer(kind, tmp_path / "a").encode(TEXTS[3]) == first.encode(TEXTS[3])
    found = measure(first, [*TEXTS, "Ünknown \x00 \u2581 <eod><|endoftext|> 😀\n\n"])
    assert found.exact == found.documents == 61 and found.tokens < found.bytes


def test_merges_are_strings_that_older_libraries_read(tmp_path: Path) -> None:
    train_bpe(TEXTS, 400, tmp_path / "tokenizer.json")
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert len(merges) > 50 and all(isinstance(merge, str) and merge.count(" ") == 1 for merge in merges)


def test_unigram_is_not_bpe(tmp_path: Path) -> None:
    one, other = (train_sentencepiece(TEXTS, 500, tmp_path / model, model) for model in ("bpe", "unigram"))
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("train", [train_bpe, train_sentencepiece])
@pytest.mark.parametrize("vocab_size", [100, 50000])
def test_a_vocabulary_that_cannot_be_is_an_error(tmp_path: Path, train: Callable, vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"{vocab_size} .*cannot be trained|cannot train {vocab_size} pieces"):
        train(TEXTS[:2], vocab_size, tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("train", [train_bpe, train_sentencepiece])
@pytest.mark.parametrize("vocab_size", [-5, 0, 258])
def test_a_vocabulary_that_no_text_makes_possible_is_refused_before_the_text_is_read(
    tmp_path: Path, train: Callable, vocab_size: int
) -> None:
    def texts() -> Iterator[str]:
        raise AssertionError("the corpus was read")
        yield ""

    with pytest.raises(DataError, match=f"vocabulary of {vocab_size} tokens cannot be trained"):
        train(texts(), vocab_size, tmp_path / "m")


@pytest.mark.parametrize("train", [train_bpe, train_sentencepiece])
@pytest.mark.parametrize("error", [DataError("corpus.jsonl: damaged"), KeyboardInterrupt("stop"), OSError("gone")])
def test_an_error_of_the_texts_comes_out_as_itself(tmp_path: Path, train: Callable, error: BaseException) -> None:
    def texts() -> Iterator[str]:
        yield TEXTS[0]
        raise error

    with pytest.raises(type(error)) as caught:
        train(texts(), 400, tmp_path / "m")
    assert caught.value is error and not (tmp_path / "m").exists()


@pytest.mark.parametrize("train", [train_bpe, train_sentencepiece])
@pytest.mark.parametrize("texts", [[], ["", " \n\n"]])
def test_no_text_is_told_as_that(tmp_path: Path, train: Callable, texts: list[str]) -> None:
    with pytest.raises(DataError, match="There is no text to train a tokenizer on"):
        train(texts, 400, tmp_path / "m")


def test_more_characters_than_pieces_need_a_larger_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot train 280 pieces .*Choose a larger vocabulary"):
        train_sentencepiece([string.printable] * 9, 280, tmp_path / "m")


def test_lines_longer_than_the_trainer_takes_are_cut(tmp_path: Path) -> None:
    words = " ".join(f"{TEXTS[1][i % 40]}word{i % 50}" for i in range(200_000))
    assert len(words) > 1 << 20
    tokenizer = train_sentencepiece([words], 320, tmp_path / "m")
    assert len(tokenizer.encode("word")) < 4


def test_every_twentieth_text_is_held_out() -> None:
    held = HeldOut()
    texts = [str(i) for i in range(45)]
    trained = list(held.rest(texts))
    assert held.texts == ["1", "21", "41"] and trained == [text for text in texts if text not in held.texts]
    assert held.characters == sum(map(len, trained))


def corpus(folder: Path) -> list[str]:
    """Two sources as the command line takes them."""
    for name, suffix in (("text", " prose and more prose"), ("code", "\n    return  x")):
        records = [
            json.dumps({"text": f"{text} {suffix} {i}", "body": f"other {i} words"}) for i, text in enumerate(TEXTS)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(records))
    return ["--input", f"text={folder}/text.jsonl", f"code={folder}/code.jsonl"]


@pytest.mark.parametrize(("kind", "model"), KINDS)
def test_the_tool_makes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, model: str) -> None:
    out = tmp_path / "out"
    arguments = [*corpus(tmp_path), "--type", kind, "--model", model, "--vocab-size", "500", "--output", str(out)]
    assert train_tokenizer.main(arguments) == 0
    printed = capsys.readouterr().out
    tokenizer = load_saved_tokenizer(out)
    assert f"tokenizer_type: {kind}\nvocab_file: {out}/tokenizer." in printed
    report = json.loads((out / "training.json").read_text())
    assert report["fingerprint"] == tokenizer.fingerprint == load_tokenizer(kind, out).fingerprint
    for found in report["sources"].values():
        assert found["held_out"]["exact"] == found["held_out"]["documents"] > 0 < found["trained_characters"]
    assert cli.main(["train-tokenizer", *arguments]) == 2
    assert "exists already" in capsys.readouterr().err


def test_weights_of_a_recipe_divide_the_text(tmp_path: Path) -> None:
    corpus(tmp_path)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"root: {tmp_path}\ntokenizer_type: CharLevelTokenizer\ntest_fraction: 0\nsources:\n"
        "  text: {paths: [text.jsonl], weight: 0.75}\n  code: {paths: [code.jsonl], weight: 0.25}\n"
    )
    options = train_tokenizer.parser().parse_args([str(recipe), "--vocab-size", "300", "--output", "x"])
    sources, rules = train_tokenizer.read_sources(options)
    assert rules.test_fraction == 0
    assert train_tokenizer.shares(sources, 1000, equal=False) == [750, 250]
    assert train_tokenizer.shares(sources, 1000, equal=True) == [500, 500]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--input", "text"], "give each input as NAME=PATH"),
        (["--text-field", "absent"], "no usable document"),
        (["--type", "HFTokenizer", "--model", "unigram"], "HFTokenizer can only be trained as bpe"),
        (["--characters", "1"], "less than one for each source"),
        (["--vocab-size", "90000"], "cannot train 90000 pieces"),
        (["--vocab-size", "200"], "vocabulary of 200 tokens cannot be trained as SPMTokenizer"),
        (["--type", "HFTokenizer", "--vocab-size", "280"], "special tokens alone are 281. Choose a larger one"),
    ],
)
def test_wrong_input_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    out = tmp_path / "out"
    arguments = [*corpus(tmp_path), "--vocab-size", "500", "--output", str(out), *change]
    assert cli.main(["train-tokenizer", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"text.jsonl", "code.jsonl"}


@pytest.mark.parametrize("option", ["--vocab-size", "--characters"])
@pytest.mark.parametrize("value", ["0", "-5"])
def test_sizes_are_positive(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        train_tokenizer.main([*corpus(tmp_path), "--vocab-size", "500", "--output", "x", f"{option}={value}"])
    assert caught.value.code == 2 and f"{value}: must be at least 1" in capsys.readouterr().err


def test_a_source_of_one_document_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("\n".join(TEXTS))
    arguments = ["--input", f"one={tmp_path}/one.txt", "--test-fraction", "0", "--vocab-size", "500"]
    assert train_tokenizer.main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert "not measured, with fewer than two documents: one" in capsys.readouterr().out
