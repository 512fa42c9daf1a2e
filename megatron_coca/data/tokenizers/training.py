"""Train a SentencePiece tokenizer on a corpus. The same texts in the same order produce the same model file."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.sentencepiece_kind import SentencePieceTokenizer
from megatron_coca.support.console import Progress

_LINE_BYTES = 1 << 20  # SentencePiece's trainer skips lines longer than this


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path, show: bool = True) -> SentencePieceTokenizer:
    """Train a SentencePiece BPE model on `texts` and write it to `path`. The model reproduces every text exactly.

    The model has byte fallback, no normalization and the control symbol `<eod>`. It keeps all white space and encodes a
    newline as its byte. With `show`, progress is shown. Raises `DataError` if `vocab_size` is too large or too small
    for the texts. If the iterator `texts` raises an error, this function raises the same error.
    """
    progress = Progress("reading text to train a tokenizer", unit="characters", show=show)
    errors: list[BaseException] = []
    try:
        with progress, path.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(texts, progress, errors),
                model_writer=writer,
                model_type="bpe",
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
        if errors:
            raise errors[0] from None
        more_characters = "required_chars" in str(error)  # the vocabulary has no room for a piece for each character
        remedy = "choose a larger vocab_size" if more_characters else "choose a smaller vocab_size, or add text"
        raise DataError(
            f"vocab_size: SentencePiece cannot train a vocabulary of {vocab_size} pieces on this text ({error}); "
            f"{remedy}"
        ) from error
    return SentencePieceTokenizer({"vocab_file": ("tokenizer.model", path.read_bytes())})


def _lines(texts: Iterable[str], progress: Progress, errors: list[BaseException]) -> Iterator[str]:
    """Yield the non-blank lines of the texts. Long lines are cut into pieces of the length that the trainer accepts. A
    character has up to four bytes.

    An error that `texts` raises is also appended to `errors`, because the trainer converts every error, even an
    interrupt, to a RuntimeError.
    """
    size = _LINE_BYTES // 4
    try:
        for text in texts:
            progress.advance(len(text))
            for line in text.split("\n"):
                pieces = (line[begin : begin + size] for begin in range(0, len(line), size))
                yield from (piece for piece in pieces if piece.strip())
    except (Exception, KeyboardInterrupt) as error:
        errors.append(error)
        raise
    progress.begin("training a tokenizer")
