"""Train tokenizers on a corpus, and measure them. The same texts in the same order give the same file."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import sentencepiece

from megatron_coca.console import Progress
from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import HFTokenizer, Tokenizer
from megatron_coca.data.tokenizers.sentencepiece_kind import SentencePieceTokenizer

_LINE_BYTES = 1 << 20  # SentencePiece's trainer leaves out longer lines
_SPECIAL = ("<|endoftext|>", "<|padding|>")
_LONGEST_SPACES = 24
SMALLEST_VOCABULARY = {
    "SPMTokenizer": 256 + len(("<unk>", "<eod>")) + 1,
    "HFTokenizer": 256 + len(_SPECIAL) + _LONGEST_SPACES - 1,
}
"""Bytes and special tokens of each type. A SentencePiece model also needs a piece for each character of the text."""


def check_vocabulary(tokenizer_type: str, vocab_size: int) -> None:
    """Raise ``DataError`` for a vocabulary too small for any text."""
    smallest = SMALLEST_VOCABULARY[tokenizer_type]
    if vocab_size < smallest:
        raise DataError(
            f"A vocabulary of {vocab_size} tokens cannot be trained as {tokenizer_type}, whose bytes and special "
            f"tokens alone are {smallest}. Choose a larger one."
        )


class _Texts:
    """An iterator of texts that counts their characters, and records the error which ended it.

    SentencePiece replaces every error raised by its iterator, an interrupt included, by a RuntimeError.
    """

    def __init__(self, texts: Iterable[str], show: bool) -> None:
        self._texts = iter(texts)
        self.progress = Progress("reading text to train a tokenizer", unit="characters", show=show)
        self.error: BaseException | None = None
        self.empty = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            text = next(self._texts)
        except StopIteration:
            self.progress.begin("training a tokenizer")
            raise
        except BaseException as error:
            self.error = error
            raise
        self.empty = self.empty and not text.strip()
        self.progress.advance(len(text))
        return text

    def raise_own(self) -> None:
        """Raise the error of the texts, or ``DataError`` if there were none or only blank ones."""
        if self.error is not None:
            raise self.error
        if self.empty:
            raise DataError("There is no text to train a tokenizer on: every document is empty, blank or left out.")


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    path: Path,
    model: Literal["bpe", "unigram"] = "bpe",
    show: bool = True,
) -> SentencePieceTokenizer:
    """Train a SentencePiece model on ``texts`` that reproduces every text exactly, and write it to ``path``.

    Byte fallback, no normalization, all white space kept, newlines as their byte; ``<eod>`` is a control symbol.
    ``show`` shows progress. Raises ``DataError`` if the texts are too small for ``vocab_size`` pieces, and errors of
    ``texts`` themselves.
    """
    check_vocabulary("SPMTokenizer", vocab_size)
    watched = _Texts(texts, show)
    try:
        with watched.progress, path.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(watched),
                model_writer=writer,
                model_type=model,
                vocab_size=vocab_size,
                byte_fallback=True,
                character_coverage=0.9999,
                normalization_rule_name="identity",
                add_dummy_prefix=False,
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                split_digits=True,
                max_sentence_length=_LINE_BYTES,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                control_symbols=["<eod>"],
                num_threads=1,
                minloglevel=2,
            )
    except (RuntimeError, ValueError) as error:
        path.unlink(missing_ok=True)
        watched.raise_own()
        more_characters = "required_chars" in str(error)  # a piece for each character does not fit
        remedy = "Choose a larger vocabulary." if more_characters else "Choose a smaller vocabulary or add text."
        raise DataError(f"SentencePiece cannot train {vocab_size} pieces on this text ({error}). {remedy}") from error
    return SentencePieceTokenizer({"vocab_file": ("tokenizer.model", path.read_bytes())})


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield lines that are not blank, cut to the length that the trainer takes; a character has up to four bytes."""
    size = _LINE_BYTES // 4
    for text in texts:
        for line in text.split("\n"):
            pieces = (line[begin : begin + size] for begin in range(0, len(line), size))
            yield from (piece for piece in pieces if piece.strip())


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> HFTokenizer:
    """Train a byte-level BPE like GPT-NeoX-20B's on ``texts``, and write it to ``path`` as ``tokenizer.json``.

    ``<|endoftext|>`` is 0, ``<|padding|>`` 1, then come bytes and merges, at the end runs of 24 down to 2 spaces for
    indented code; ``vocab_size`` counts all of them. Unlike GPT-NeoX-20B's it has no normalizer. Raises ``DataError``
    if the texts are too small for that many tokens.
    """
    check_vocabulary("HFTokenizer", vocab_size)
    watched = _Texts(texts, show=True)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=True)
    model.decoder = decoders.ByteLevel()
    spaces = [" " * count for count in range(_LONGEST_SPACES, 1, -1)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(spaces),
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Runs of spaces are tokens already: merges of them would never be used.
    with watched.progress:
        model.train_from_iterator((part for text in watched for part in re.split(" {2,}", text) if part), trainer)
    watched.raise_own()
    model.add_tokens([AddedToken(run, normalized=True) for run in spaces])
    if model.get_vocab_size() != vocab_size:
        raise DataError(
            f"A byte-level BPE of {vocab_size} tokens cannot be trained on this text, which yields only "
            f"{model.get_vocab_size()}. Choose a smaller vocabulary or add text."
        )
    content = json.loads(model.to_str())
    # As GPT-NeoX's tokenizers 0.15 reads them, and newer ones too: a byte-level token contains no space.
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return HFTokenizer({"vocab_file": ("tokenizer.json", path.read_bytes())})


TRAINERS: dict[str, dict[str, Callable[[Iterable[str], int, Path], Tokenizer]]] = {
    "SPMTokenizer": {
        "bpe": train_sentencepiece,
        "unigram": lambda texts, vocab_size, path: train_sentencepiece(texts, vocab_size, path, "unigram"),
    },
    "HFTokenizer": {"bpe": train_bpe},
}
"""Training functions by ``tokenizer_type`` and model."""

HELD_OUT_EVERY = 20
"""One document of this many is measured instead of trained on."""


@dataclass
class HeldOut:
    """Texts of one source that are held out from training.

    Attributes:
        characters: passed on to be trained on.
        texts: every ``HELD_OUT_EVERY``-th text, from the second one on.
    """

    characters: int = 0
    texts: list[str] = field(default_factory=list)

    def rest(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts to train on."""
        for number, text in enumerate(texts):
            if number % HELD_OUT_EVERY == 1:
                self.texts.append(text)
            else:
                self.characters += len(text)
                yield text


@dataclass(frozen=True)
class Measure:
    """Number of texts, their UTF-8 bytes and tokens (no separators), and how many decode to exactly the same text."""

    documents: int
    bytes: int
    tokens: int
    exact: int

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes per token, None if nothing was measured."""
        return self.bytes / self.tokens if self.tokens else None


def measure(tokenizer: Tokenizer, texts: Iterable[str]) -> Measure:
    """Encode and decode ``texts``, one at a time."""
    documents = size = tokens = exact = 0
    for text in texts:
        ids = tokenizer.encode(text)
        documents += 1
        size += len(text.encode())
        tokens += len(ids)
        exact += tokenizer.decode(ids) == text
    return Measure(documents, size, tokens, exact)
