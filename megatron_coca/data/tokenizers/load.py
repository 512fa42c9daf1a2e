"""Which tokenizer: by GPT-NeoX's name for it, from where it was saved, or trained on a corpus."""

import json
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.kinds import (
    DESCRIPTION,
    CharLevelTokenizer,
    FileTokenizer,
    GPT2BPETokenizer,
    HFGPT2Tokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)

_GPT2_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
# GPT-NeoX's names, each with the files it is made from and the names they are saved under.
TOKENIZERS: dict[str, tuple[type[FileTokenizer], dict[str, str]]] = {
    "SPMTokenizer": (SentencePieceTokenizer, {"vocab_file": "tokenizer.model"}),
    "HFTokenizer": (HFTokenizer, {"vocab_file": "tokenizer.json"}),
    "HFGPT2Tokenizer": (HFGPT2Tokenizer, _GPT2_FILES),
    "GPT2BPETokenizer": (GPT2BPETokenizer, _GPT2_FILES),
    "CharLevelTokenizer": (CharLevelTokenizer, {}),
}


def _read(tokenizer_type: str, argument: str, path: str | Path | None) -> bytes:
    if path is None:
        raise DataError(f"{tokenizer_type} needs {argument}: set it to the tokenizer's file.")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the tokenizer ({error.strerror}). Set {argument} to a file for {tokenizer_type}."
        ) from error


def load_tokenizer(
    tokenizer_type: str, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
) -> Tokenizer:
    """Open a tokenizer by GPT-NeoX's name for it.

    A folder given to HFGPT2Tokenizer stands for its ``vocab.json`` and ``merges.txt``; nothing is ever downloaded.
    Raises ``DataError`` for an unknown type and for a missing, unreadable or foreign file.
    """
    if tokenizer_type not in TOKENIZERS:
        raise DataError(f"Unknown tokenizer_type {tokenizer_type!r}. Known are {', '.join(TOKENIZERS)}.")
    kind, names = TOKENIZERS[tokenizer_type]
    if "merge_file" in names and vocab_file is not None and Path(vocab_file).is_dir():
        vocab_file, merge_file = Path(vocab_file) / "vocab.json", merge_file or Path(vocab_file) / "merges.txt"
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    files = {argument: (name, _read(tokenizer_type, argument, given[argument])) for argument, name in names.items()}
    try:
        return kind(files)
    except DataError as error:
        raise DataError(f"{vocab_file}: {error}") from error
    except Exception as error:  # the libraries raise RuntimeError, plain Exception, ValueError for a foreign file
        raise DataError(f"{vocab_file}: not a file that {tokenizer_type} can open ({error}).") from error


def load_saved_tokenizer(folder: str | Path) -> Tokenizer:
    """Open what ``Tokenizer.save(folder)`` wrote. ``DataError`` where it is missing, damaged or changed since."""
    path = Path(folder) / DESCRIPTION
    try:
        saved = json.loads(path.read_text())
        names = {argument: saved.get(argument) for argument in ("vocab_file", "merge_file")}
        tokenizer_type, fingerprint = saved["tokenizer_type"], saved["fingerprint"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer's description ({error}).") from error
    files = {argument: Path(folder) / name for argument, name in names.items() if name}
    tokenizer = load_tokenizer(tokenizer_type, **files)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{folder}: the tokenizer's files have changed since they were saved. Restore the originals.")
    return tokenizer


def train_sentencepiece(texts: Iterable[str], vocab_size: int, path: Path) -> SentencePieceTokenizer:
    """Train an exact SentencePiece BPE model on ``texts`` and write it to ``path``.

    Byte fallback, identity normalisation, all white space kept; ``<eod>`` is a control symbol. Newlines go through as
    their byte. Raises ``DataError`` where the texts cannot carry ``vocab_size`` pieces.
    """
    try:
        with path.open("wb") as writer:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.split("\n") if line.strip()),
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
                max_sentence_length=1 << 20,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                control_symbols=["<eod>"],
                num_threads=1,
                minloglevel=2,
            )
    except (RuntimeError, ValueError) as error:
        path.unlink(missing_ok=True)
        raise DataError(
            f"SentencePiece cannot train {vocab_size} pieces on this text ({error}). "
            "Take a smaller vocabulary, one of at least 300, or more text."
        ) from error
    tokenizer = load_tokenizer("SPMTokenizer", path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer
