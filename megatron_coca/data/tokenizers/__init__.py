"""Open tokenizers by type (as named in GPT-NeoX), or from the folder to which they were saved."""

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.chat import find_template, saved_template
from megatron_coca.data.tokenizers.end_tokens import check_links, named_ends, read_object
from megatron_coca.data.tokenizers.huggingface_kind import GPT2BPETokenizer, HFGPT2Tokenizer, HFTokenizer, LibraryError
from megatron_coca.data.tokenizers.kinds import DESCRIPTION, CharLevelTokenizer, Files, Tokenizer, fingerprint_of
from megatron_coca.data.tokenizers.sentencepiece_kind import SentencePieceTokenizer
from megatron_coca.data.tokenizers.text_rules import find_rules, rules_of
from megatron_coca.data.tokenizers.training import train_sentencepiece
from megatron_coca.data.tokenizers.vocab_and_merges import as_tokenizer_json, class_of, has_files
from megatron_coca.support.regular_files import inside, read_regular

__all__ = ["TOKENIZERS", "load_saved_tokenizer", "load_tokenizer", "needs_files", "train_sentencepiece"]

logger = logging.getLogger(__name__)
_GPT2_FILES = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
# Maps the name of each type (as in GPT-NeoX) to its class, and to the names under which its files are saved.
TOKENIZERS: dict[str, tuple[type[Tokenizer], dict[str, str]]] = {
    "SPMTokenizer": (SentencePieceTokenizer, {"vocab_file": "tokenizer.model"}),
    "HFTokenizer": (HFTokenizer, {"vocab_file": "tokenizer.json"}),
    "HFGPT2Tokenizer": (HFGPT2Tokenizer, _GPT2_FILES),
    "GPT2BPETokenizer": (GPT2BPETokenizer, _GPT2_FILES),
    "CharLevelTokenizer": (CharLevelTokenizer, {}),
}
# The types of GPT-NeoX that are not supported, each with the reason and a remedy.
_UNSUPPORTED = {
    "TiktokenTokenizer": "its vocab_file names a download, but tokenizers are not downloaded here; convert the "
    'tokenizer once: transformers.integrations.tiktoken.convert_tiktoken_to_fast("cl100k_base", "cl100k_base") writes '
    "a folder with tokenizer.json; then set tokenizer_type to HFTokenizer, and vocab_file to that folder"
}


def load_tokenizer(
    tokenizer_type: str,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    eod: str | None = None,
) -> Tokenizer:
    """Open a tokenizer, given its type (as named in GPT-NeoX) and its files. Nothing is downloaded.

    If `vocab_file` is a folder, the files with the usual names in it are read. `eod` is the symbol that ends documents.
    By default it is the end-of-text symbol that the files next to `vocab_file` define, or else the default of the type.
    If the symbol is not the default of the type, the tokenizer has a different fingerprint. Raises `DataError` for an
    unknown type, for a symbol that is not in the vocabulary, and for a file that is missing, unreadable or in another
    format. Also raises `DataError` if a file next to `vocab_file` is a link that leads out of the folder.
    """
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    if vocab_file is not None:
        check_links(
            Path(vocab_file) if Path(vocab_file).is_dir() else Path(vocab_file).parent, named=(vocab_file, merge_file)
        )
    if vocab_file is not None and Path(vocab_file).is_dir():
        for argument, name in _file_names(tokenizer_type).items():
            given[argument] = (merge_file if argument == "merge_file" else None) or Path(vocab_file) / name
    place = str(vocab_file or tokenizer_type)
    files = _assembled(tokenizer_type, Path(place)) or _read_files(tokenizer_type, given)
    if eod is None and vocab_file is not None and (Path(vocab_file).is_dir() or _is_usual(tokenizer_type, vocab_file)):
        folder = Path(vocab_file) if Path(vocab_file).is_dir() else Path(vocab_file).parent
        tokenizer = _open_with_named_end(tokenizer_type, files, folder, place)
    else:
        tokenizer = _open(tokenizer_type, files, eod, place)
    if vocab_file is not None:
        folder = Path(vocab_file) if Path(vocab_file).is_dir() else Path(vocab_file).parent
        tokenizer.chat = find_template(folder)
        if Path(vocab_file).is_dir() or Path(vocab_file).name in _file_names(tokenizer_type).values():
            # If `vocab_file` has an unusual name, its folder may not belong to the model, so no rules are read from it.
            tokenizer.rules = find_rules(folder)
        # An error here only means that `Tokenizer.save` did not write this folder.
        with suppress(OSError, ValueError, KeyError, AttributeError, RecursionError):
            _take_settings(tokenizer, json.loads(read_regular(folder / DESCRIPTION)))
    return tokenizer


def _assembled(tokenizer_type: str, folder: Path) -> Files | None:
    """Build a tokenizer.json from vocab.json, merges.txt and the files that add tokens to them. Return None if the
    folder or the type needs no such file.

    Raises `DataError` if the folder's tokenizer splits texts differently from this type, or in an unknown way.
    """
    if not has_files(folder):
        return None
    if tokenizer_type == "HFTokenizer":
        return {"vocab_file": ("tokenizer.json", as_tokenizer_json(folder))}
    if (
        TOKENIZERS.get(tokenizer_type, (None, None))[1] is _GPT2_FILES
        and (name := class_of(folder)) == "Qwen2Tokenizer"
    ):
        raise DataError(
            f"{folder}: has a {name}, which divides texts differently from {tokenizer_type}; use HFTokenizer"
        )
    return None


def _take_settings(tokenizer: Tokenizer, saved: Mapping[str, Any]) -> None:
    """Apply the start symbol, chat template and text rules in `saved`, the description of a saved tokenizer. They are
    applied only if the saved tokenizer has the same files as `tokenizer`.

    Raises ValueError, KeyError or AttributeError if the description is damaged.
    """
    template, start, rules = saved_template(saved), saved.get("start_symbol"), rules_of(saved.get("text_rules", {}))
    if not isinstance(start, str | None):
        raise ValueError("start_symbol is not text")
    if saved["fingerprint"] == fingerprint_of(tokenizer.tokenizer_type, tokenizer.files, saved.get("eod_symbol")):
        tokenizer.start_symbol, tokenizer.chat, tokenizer.rules = start, template or tokenizer.chat, rules


def load_saved_tokenizer(folder: str | Path) -> Tokenizer:
    """Open a tokenizer that `Tokenizer.save(folder)` wrote. Raises `DataError` if its files are missing, damaged or
    have changed.
    """
    path = Path(folder) / DESCRIPTION
    try:
        saved = json.loads(read_regular(path))
        names = {argument: saved.get(argument) for argument in ("vocab_file", "merge_file")}
        tokenizer_type, fingerprint, eod = saved["tokenizer_type"], saved["fingerprint"], saved.get("eod_symbol")
        if not isinstance(eod, str | None):
            raise ValueError("eod_symbol is not text")
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    files = _read_files(
        tokenizer_type, {argument: inside(folder, str(name), DataError) for argument, name in names.items() if name}
    )
    # This check comes before the files are opened, because the libraries' errors for changed files are misleading.
    if fingerprint_of(tokenizer_type, files, eod) != fingerprint:
        raise DataError(f"{folder}: the tokenizer files have changed since they were saved; restore the original files")
    tokenizer = _open(tokenizer_type, files, eod, str(folder))
    try:
        _take_settings(tokenizer, saved)
    except (ValueError, KeyError, AttributeError) as error:
        raise _unreadable(path, error) from error
    return tokenizer


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read ({error}); restore this file, which describes the tokenizer")


def needs_files(tokenizer_type: str) -> bool:
    """Return True if this tokenizer type needs files. In this case, the name of the type does not identify the
    tokenizer.
    """
    return tokenizer_type not in TOKENIZERS or bool(TOKENIZERS[tokenizer_type][1])


def _file_names(tokenizer_type: str) -> dict[str, str]:
    if tokenizer_type in _UNSUPPORTED:
        raise DataError(f"tokenizer_type: {tokenizer_type} is not supported; {_UNSUPPORTED[tokenizer_type]}")
    if tokenizer_type not in TOKENIZERS:
        raise DataError(f"tokenizer_type: unknown type {tokenizer_type!r}; supported types: {', '.join(TOKENIZERS)}")
    return TOKENIZERS[tokenizer_type][1]


def _read_files(tokenizer_type: str, given: Mapping[str, str | Path | None]) -> Files:
    files = {}
    for argument, name in _file_names(tokenizer_type).items():
        path = given.get(argument)
        if path is None:
            raise DataError(f"{argument}: is required for {tokenizer_type}; set {argument} to the tokenizer file")
        try:
            files[argument] = (name, read_regular(path))
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); set {argument} to a readable file for {tokenizer_type}"
            ) from error
    return files


def _is_usual(tokenizer_type: str, file: str | Path) -> bool:
    """Return True if a file has the usual name for this type. Otherwise the files next to it may not belong to the
    tokenizer.
    """
    return Path(file).name in _file_names(tokenizer_type).values()


def _open_with_named_end(tokenizer_type: str, files: Files, folder: Path, place: str) -> Tokenizer:
    """Open a tokenizer with the end-of-text symbol that its folder defines, or else with the default of the type."""
    saved = read_object(folder / DESCRIPTION)
    symbol = saved.get("eod_symbol")
    if isinstance(symbol, str) and saved.get("fingerprint") == fingerprint_of(tokenizer_type, files, symbol):
        return _open(tokenizer_type, files, symbol, place)
    try:
        default = _open(tokenizer_type, files, None, place)
    except DataError as error:
        return _open_first(tokenizer_type, files, named_ends(folder), place, error)
    named = [default.piece(end) if isinstance(end, int) else end for end in named_ends(folder) if _has(default, end)]
    if not named or named[0] == default.piece(default.eod):
        return default
    try:
        return _open(tokenizer_type, files, named[0], place)
    except DataError as error:
        used = default.piece(default.eod)
        logger.warning(
            "%s; documents end with the default %r instead; pass --end-token to choose another symbol", error, used
        )
        return default


def _has(tokenizer: Tokenizer, end: int | str) -> bool:
    """Return True if the vocabulary of a tokenizer contains `end`, an id or a symbol."""
    if isinstance(end, int):
        return 0 <= end < tokenizer.vocab_size
    try:
        return tokenizer.token(end) is not None
    except DataError:
        return False


def _open_first(
    tokenizer_type: str, files: Files, ends: Iterable[int | str], place: str, error: DataError
) -> Tokenizer:
    """Open a tokenizer with the first of `ends` that can end documents. Raises `error` if none of them can."""
    for end in ends:
        try:
            return _open(tokenizer_type, files, str(end), place)
        except DataError as other:
            logger.info("%s", other)
    raise error


def _open(tokenizer_type: str, files: Files, eod: str | None, place: str) -> Tokenizer:
    try:
        return TOKENIZERS[tokenizer_type][0](files, eod)
    # For files in other formats the libraries raise RuntimeError, plain Exception or ValueError, or panic.
    except Exception as error:
        if isinstance(error, DataError) and not isinstance(error, LibraryError):
            raise DataError(f"{place}: {error}") from error
        reason = error.reason if isinstance(error, LibraryError) else error
        raise DataError(
            f"{place}: {tokenizer_type} cannot open this file ({reason}); check that the file is complete and matches "
            "tokenizer_type"
        ) from error
