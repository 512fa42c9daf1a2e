"""Tokenizers trained on a corpus. The same texts in the same order give the same file."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import sentencepiece

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import FileTokenizer, HFTokenizer, Tokenizer
from megatron_coca.data.tokenizers.sentencepiece_kind import SentencePieceTokenizer

_LINE_BYTES = 1 << 20  # SentencePiece's trainer leaves out longer lines
_SPECIAL = ("<|endoftext|>", "<|padding|>")
_LONGEST_SPACES = 24
_BYTES = 256
# By whether SentencePiece complains that a piece for each character does not fit.
_REMEDIES = {True: "Take a larger vocabulary.", False: "Take a smaller vocabulary or more text."}
LEAST = {
    "SPMTokenizer": _BYTES + len(("<unk>", "<eod>")) + 1,
    "HFTokenizer": _BYTES + len(_SPECIAL) + _LONGEST_SPACES - 1,
}
"""The smallest vocabulary of each type: what it holds whatever the text. A SentencePiece model needs more, a piece for
each character of the text.
"""


def check_vocabulary(tokenizer_type: str, vocab_size: int) -> None:
    """Raise ``DataError`` for a vocabulary that no text makes possible."""
    if vocab_size < LEAST[tokenizer_type]:
        raise DataError(
            f"A vocabulary of {vocab_size} tokens cannot be trained as {tokenizer_type}, whose bytes and special "
            f"tokens are {LEAST[tokenizer_type]} already. Take a larger one."
        )


class _Watched:
    """An iterator of texts that keeps the error which ended it, and whether it gave any text.

    SentencePiece makes a RuntimeError with a text of its own out of everything that is raised in between, an interrupt
    included.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)
        self.error: BaseException | None = None
        self.empty = True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            text = next(self._texts)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        self.empty = self.empty and not text.strip()
        return text

    def raise_own(self) -> None:
        """Raise the error of the texts, or a ``DataError`` where they were none or blank."""
        if self.error is not None:
            raise self.error
        if self.empty:
            raise DataError("There is no text to train a tokenizer on: every document is empty, blank or left out.")


def train_sentencepiece(
    texts: Iterable[str], vocab_size: int, path: Path, model: Literal["bpe", "unigram"] = "bpe"
) -> SentencePieceTokenizer:
    """Train an exact SentencePiece model on ``texts`` and write it to ``path``.

    Byte fallback, identity normalisation, all white space kept; ``<eod>`` is a control symbol. Newlines go through as
    their byte. Raises ``DataError`` where the texts cannot carry ``vocab_size`` pieces; errors of ``texts`` themselves
    come out as they are.
    """
    check_vocabulary("SPMTokenizer", vocab_size)
    watched = _Watched(texts)
    try:
        with path.open("wb") as writer:
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
        remedy = _REMEDIES["required_chars" in str(error)]
        raise DataError(f"SentencePiece cannot train {vocab_size} pieces on this text ({error}). {remedy}") from error
    return SentencePieceTokenizer({"vocab_file": ("tokenizer.model", path.read_bytes())})


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines that are not blank, cut where they are too long for the trainer; a character has up to four bytes."""
    for text in texts:
        for line in text.split("\n"):
            for begin in range(0, len(line), _LINE_BYTES // 4):
                part = line[begin : begin + _LINE_BYTES // 4]
                if part.strip():
                    yield part


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> HFTokenizer:
    """Train an exact byte-level BPE ``tokenizer.json`` of GPT-NeoX-20B's shape on ``texts`` and write it to ``path``.

    ``<|endoftext|>`` is 0, ``<|padding|>`` 1, then come bytes and merges, at the end runs of 24 down to 2 spaces, which
    keep the indentation of code short. Unlike GPT-NeoX-20B's it has no normaliser. ``vocab_size`` counts all of them.
    Raises ``DataError`` where the texts cannot carry so many tokens.
    """
    check_vocabulary("HFTokenizer", vocab_size)
    watched = _Watched(texts)
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
    model.train_from_iterator(_between_spaces(watched), trainer)
    watched.raise_own()
    model.add_tokens([AddedToken(run, normalized=True) for run in spaces])
    if model.get_vocab_size() != vocab_size:
        raise DataError(
            f"A byte-level BPE of {vocab_size} tokens cannot be trained on this text, which carries "
            f"{model.get_vocab_size()}. Take a smaller vocabulary or more text."
        )
    path.write_text(model.to_str(pretty=True) + "\n", encoding="utf-8")
    return HFTokenizer({"vocab_file": ("tokenizer.json", path.read_bytes())})


def _between_spaces(texts: Iterable[str]) -> Iterator[str]:
    """What lies between runs of spaces: those are tokens already, and merges for them would never be used."""
    for text in texts:
        yield from filter(None, re.split(" {2,}", text))


TRAINERS: dict[str, dict[str, Callable[[Iterable[str], int, Path], FileTokenizer]]] = {
    "SPMTokenizer": {
        "bpe": train_sentencepiece,
        "unigram": lambda texts, vocab_size, path: train_sentencepiece(texts, vocab_size, path, "unigram"),
    },
    "HFTokenizer": {"bpe": train_bpe},
}
"""What can be trained, by ``tokenizer_type`` and model."""

HELD_OUT_EVERY = 20
"""One document in so many is not trained on, but measured."""


@dataclass(frozen=True)
class Measure:
    """What a tokenizer makes of some texts.

    Attributes:
        documents: number of texts.
        bytes: of their UTF-8.
        tokens: without separators.
        exact: texts that come back from their tokens as they were.
    """

    documents: int
    bytes: int
    tokens: int
    exact: int

    @property
    def bytes_per_token(self) -> float | None:
        """None where nothing was measured."""
        return self.bytes / self.tokens if self.tokens else None


@dataclass
class HeldOut:
    """Keeps some texts of one source from the training.

    Attributes:
        characters: given out to be trained on.
        texts: kept; every ``HELD_OUT_EVERY``-th, from the second one on.
    """

    characters: int = 0
    texts: list[str] = field(default_factory=list)

    def rest(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts to train on."""
        for number, text in enumerate(texts):
            if number % HELD_OUT_EVERY == 1:
                self.texts.append(text)
            else:
                self.characters += len(text)
                yield text


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
