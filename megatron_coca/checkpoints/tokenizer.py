"""Find the tokenizer of a checkpoint. Evaluation, import and export use the same rule for every layout.

The first of these tokenizers that exists is used:

1. The tokenizer that overrides select with `tokenizer_type`, `vocab_file` and `merge_file`. If it cannot be read or
   does not fit the embedding, the command stops with an error.
2. The tokenizer in the checkpoint's folder: our `tokenizer/`, or files with transformers' names (tokenizer.json;
   tokenizer.model; vocab.json with merges.txt).
3. The tokenizer that the checkpoint's configuration selects with the same keys, in config.yml or in GPT-NeoX's
   `configs/*.yml`. (GPT-NeoX saves no tokenizer.) As in GPT-NeoX, paths are relative to the working directory.

A tokenizer of item 3 that cannot be used is skipped with a note. So is a tokenizer of item 2 in files with
transformers' names. The tokens that end a text always come from the model's own folder. A tokenizer fits if the
embedding has a row for every id, except for tokens that were added to the vocabulary later, such as an unused padding
token. A text with such a token raises an error.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.files import CheckpointError, read_json_if_present
from megatron_coca.config import Config
from megatron_coca.data import DataError, Tokenizer, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.tokenizers import needs_files
from megatron_coca.data.tokenizers.end_tokens import check_links, with_text_keys
from megatron_coca.data.tokenizers.kinds import first_difference
from megatron_coca.data.tokenizers.text_rules import find_rules
from megatron_coca.data.tokenizers.vocab_and_merges import has_files, is_plain_gpt2

KINDS = (
    ("HFTokenizer", ("tokenizer.json",)),
    ("SPMTokenizer", ("tokenizer.model",)),
    ("GPT2BPETokenizer", ("vocab.json", "merges.txt")),
)
"""Tokenizer types in order of preference, with the files that each needs."""
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files of a Hugging Face folder that may define the end-of-text token, in order of preference."""
KEYS = ("tokenizer_type", "vocab_file", "merge_file")


class Found(NamedTuple):
    """A tokenizer or None, and a note or None. If there is no tokenizer, the note states why."""

    tokenizer: Tokenizer | None
    note: str | None


def find_tokenizer(
    folder: Path, saved: Path | None, trained: Config, end: str | None, given: Mapping[str, Any]
) -> Found:
    """Return the tokenizer that the rule above selects, or None with the reason.

    Args:
        folder: folder of the checkpoint.
        saved: folder of the tokenizer that `Tokenizer.save` saved with the weights, or None.
        trained: configuration of the checkpoint.
        end: the token that ended documents in training, or None if it is unknown. The vocabulary may lack it.
        given: configuration values that overrides set.

    Raises:
        CheckpointError: the tokenizer that overrides select has more ids than the embedding has rows.
        DataError: the tokenizer that overrides select cannot be opened, or the saved tokenizer is damaged.
    """
    rows = trained.model.padded_vocab_size
    recorded = {key: getattr(trained.data, key) for key in KEYS}
    named = {key: given.get(key, recorded[key]) for key in KEYS}
    if (given.keys() & set(KEYS)) and _is_complete(named):
        tokenizer, note = _load_with_end(**named, end=end)
        if not fits(tokenizer, rows):
            raise CheckpointError(
                f"{named['vocab_file'] or named['tokenizer_type']}: has {tokenizer.vocab_size} ids, but the embedding "
                f"of {folder} has {rows} rows; use the tokenizer that the model was trained with"
            )
        return Found(_with_ends(tokenizer, folder, saved), note)
    if saved is not None:
        tokenizer = load_saved_tokenizer(saved)
        fits(tokenizer, rows)
        return Found(tokenizer, None)
    found = read_tokenizer(folder, rows, end)
    if found.tokenizer is not None or not _is_complete(recorded):
        return found
    source = f"the checkpoint's configuration has tokenizer_type {recorded['tokenizer_type']}"
    if recorded["vocab_file"]:
        source += f" and vocab_file {recorded['vocab_file']}"
    try:
        tokenizer, note = _load_with_end(**recorded, end=end)
    except DataError as error:
        remedy = (
            "select a tokenizer with --set tokenizer_type=HFTokenizer vocab_file=PATH (or another type), "
            f"or copy the tokenizer's file into {folder}"
        )
        return Found(None, f"{found.note}; {source}, which cannot be read here ({error}): {remedy}")
    if not fits(tokenizer, rows):
        return Found(
            None, f"{found.note}; {source}, which has {tokenizer.vocab_size} ids, but the embedding has {rows} rows"
        )
    return Found(_with_ends(tokenizer, folder, saved), note)


def fits(tokenizer: Tokenizer, rows: int) -> bool:
    """Return whether a tokenizer fits an embedding. Sets `Tokenizer.rows` if it has added tokens without a row."""
    if tokenizer.vocab_size <= rows:
        return True
    if tokenizer.base_size > rows or tokenizer.eod >= rows:
        return False
    tokenizer.rows = rows
    return True


def _with_ends(tokenizer: Tokenizer, folder: Path, saved: Path | None) -> Tokenizer:
    """Add the ids that end a text: from the saved tokenizer if it encodes texts equally, else from `folder`."""
    rules = find_rules(folder)
    if saved is not None:
        with suppress(DataError):  # a damaged saved tokenizer does not matter, because overrides replace it
            own = load_saved_tokenizer(saved)
            rules = own.rules if first_difference(own, tokenizer) is None else rules
    tokenizer.rules = replace(tokenizer.rules, ends=tuple(dict.fromkeys([*tokenizer.rules.ends, *rules.ends])))
    return tokenizer


def _is_complete(keys: Mapping[str, Any]) -> bool:
    return keys["vocab_file"] is not None or not needs_files(keys["tokenizer_type"])


def read_tokenizer(folder: Path, rows: int, end: str | None = None) -> Found:
    """Return the tokenizer in a Hugging Face folder, with the folder's end-of-text token, or None with the reason.

    Args:
        folder: a folder with tokenizer files under transformers' names.
        rows: number of embedding rows. A tokenizer with more ids is not used.
        end: the end-of-text token to use if the folder defines none and the vocabulary has this token.

    Raises CheckpointError for a link that leads out of the folder.
    """
    check_links(folder, CheckpointError)
    reasons = []
    for kind, files in KINDS:
        if not all((folder / name).is_file() for name in files):
            continue
        try:
            assembled = has_files(folder) and not is_plain_gpt2(folder)
            tokenizer, note = _load_from_folder("HFTokenizer" if assembled else kind, folder, end)
        except (DataError, CheckpointError) as error:
            reasons.append(str(error))
            continue
        if fits(tokenizer, rows):
            return Found(tokenizer, note)
        reasons.append(f"{folder / files[0]}: has {tokenizer.vocab_size} ids, but the embedding has {rows} rows")
    return Found(None, f"no tokenizer is used: {'; '.join(reasons) or f'{folder} has none'}")


def _load_from_folder(kind: str, folder: Path, end: str | None) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer in a folder, and a note or None.

    Its end-of-text token is the one that files of the folder define. If they define none, it is `end` if the vocabulary
    has this token, else the tokenizer's default.
    """
    default = _try_load(kind, folder, None)
    errors = []
    for symbol in _end_symbols(folder):
        if not isinstance(default, DataError):
            if symbol in (default.eod, default.piece(default.eod)):
                return default, None
            if isinstance(symbol, int) and 0 <= symbol < default.vocab_size:
                symbol = default.piece(symbol)
        chosen = _try_load(kind, folder, str(symbol))
        if not isinstance(chosen, DataError):
            return chosen, None
        errors.append(chosen)
    if not errors and end is not None:
        return _load_with_end(kind, str(folder), None, end)
    if isinstance(default, DataError):
        raise default
    if not errors:
        return default, None
    used = repr(default.piece(default.eod))
    return default, f"{folder}: its end-of-text token cannot be used ({errors[0]}); using {used}"


def _try_load(kind: str, folder: Path, end: str | None) -> Tokenizer | DataError:
    try:
        return load_tokenizer(kind, folder, eod=end)
    except DataError as error:
        return error


def _load_with_end(
    tokenizer_type: str, vocab_file: str | None, merge_file: str | None, end: str | None
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer that configuration keys select, and a note or None.

    Its end-of-text token is `end` if the vocabulary has it, else the tokenizer's default. Raises DataError.
    """
    tokenizer = load_tokenizer(tokenizer_type, vocab_file, merge_file)
    default = tokenizer.piece(tokenizer.eod)
    if end is None or default == end or not needs_files(tokenizer_type):
        return tokenizer, None
    try:
        return load_tokenizer(tokenizer_type, vocab_file, merge_file, eod=end), None
    except DataError:  # `end` is not in the vocabulary
        return tokenizer, f"{vocab_file}: has no {end!r}, which ends documents in GPT-NeoX; using {default!r}"


def _end_symbols(folder: Path) -> Iterator[int | str]:
    """Yield each end-of-text id or token that a file of the folder defines. From a list, yield the first entry."""
    for name in CONFIGS:
        content = with_text_keys(read_json_if_present(folder / name))
        for key in ("eos_token_id", "eos_token"):
            value = content.get(key)
            if isinstance(value, Mapping):
                value = value.get("content")
            elif isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, int | str):
                yield value


def largest_named_id(folder: Path) -> int:
    """Return the largest token id in the JSON files of a Hugging Face folder except the vocabulary, or -1."""
    ids: list[Any] = list(read_json_if_present(folder / "added_tokens.json").values())
    declared = read_json_if_present(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    ids += [int(number) for number in declared if isinstance(number, str) and re.fullmatch("[0-9]{1,9}", number)]
    for name in CONFIGS:
        content = with_text_keys(read_json_if_present(folder / name))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = content.get(key)
            ids += value if isinstance(value, list) else [value]
    return max((token for token in ids if isinstance(token, int)), default=-1)


def made_of(tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether a tokenizer was loaded from files with the same content as those in a folder."""
    sources = ([folder / name for name in names] for _, names in KINDS)
    contents = (b"".join(path.read_bytes() for path in paths) for paths in sources if all(map(Path.is_file, paths)))
    return any(hashlib.sha256(content).hexdigest() == tokenizer.fingerprint for content in contents)
