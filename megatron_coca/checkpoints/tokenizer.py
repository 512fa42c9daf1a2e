"""Which tokenizer a checkpoint has: one rule for evaluation, import and export, and for every layout.

The first of these that there is:

1. the one that is named beside the checkpoint: `tokenizer_type`, `vocab_file`, `merge_file` of overrides;
2. the one in its folder: `tokenizer/` as our checkpoints carry it, else files under transformers' names
   (tokenizer.json; tokenizer.model; vocab.json with merges.txt);
3. the one that its configuration records: the same keys in config.yml, or in the `configs/*.yml` of GPT-NeoX, which
   saves no tokenizer; a relative path counts from the working directory, as there.

What is named must open and fit; what is found elsewhere and does not is left out, and the note says why.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.native import read_json
from megatron_coca.config import Config
from megatron_coca.config.source import given_values
from megatron_coca.data import DataError, Tokenizer, load_saved_tokenizer, load_tokenizer
from megatron_coca.data.tokenizers import needs_files

KINDS = (
    ("HFTokenizer", ("tokenizer.json",)),
    ("SPMTokenizer", ("tokenizer.model",)),
    ("GPT2BPETokenizer", ("vocab.json", "merges.txt")),
)
"""Ours in order of preference, with the files that each is made of."""

END, END_ID = "eos_token", "eos_token_id"
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Where a folder may say what ends a text, in order of preference."""


class Found(NamedTuple):
    """A tokenizer, or None, and what there is to say about it, or None."""

    tokenizer: Tokenizer | None
    note: str | None


def read_tokenizer(folder: Path, rows: int, end: str | None = None) -> Found:
    """The tokenizer of a folder, with the end of text that the folder names.

    A folder without one, or with one that cannot be taken, is no error: the note says why there is none.

    Args:
        folder: with the tokenizer's files, under transformers' names for them.
        rows: of the embedding; a tokenizer with more ids than that belongs to another model.
        end: what ends a text where the folder says nothing of it and the vocabulary has this symbol.
    """
    reasons = []
    for kind, files in KINDS:
        if not all((folder / name).is_file() for name in files):
            continue
        try:
            tokenizer, note = _with_end(kind, folder, end)
        except (DataError, CheckpointError) as error:
            reasons.append(str(error))
            continue
        if tokenizer.vocab_size <= rows:
            return Found(tokenizer, note)
        reasons.append(f"{folder / files[0]}: has {tokenizer.vocab_size} ids, the embedding has {rows} rows")
    return Found(None, f"no tokenizer is taken: {'; '.join(reasons) or f'{folder} has none'}")


def load_with_end(
    tokenizer_type: str, vocab_file: str | None, merge_file: str | None, end: str | None
) -> tuple[Tokenizer, str | None]:
    """A tokenizer by its keys, whose texts end with `end` where the vocabulary has it, and a note or None. Raises
    DataError.
    """
    tokenizer = load_tokenizer(tokenizer_type, vocab_file, merge_file)
    if end is None or tokenizer.piece(tokenizer.eod) == end or not needs_files(tokenizer_type):
        return tokenizer, None
    try:
        return load_tokenizer(tokenizer_type, vocab_file, merge_file, eod=end), None
    except DataError:  # the vocabulary lacks it
        told = (
            f"{vocab_file}: has no {end!r}, which ends documents in GPT-NeoX; {tokenizer.piece(tokenizer.eod)!r} does"
        )
        return tokenizer, told


def largest_named_id(folder: Path) -> int:
    """The largest token id that the JSON files of a Hugging Face folder name beside the vocabulary, -1 without one."""
    return max(_named_ids(folder), default=-1)


def _named_ids(folder: Path) -> Iterator[int]:
    for name in CONFIGS:
        content = _json(folder / name)
        for key in ("bos_token_id", END_ID, "pad_token_id"):
            value = content.get(key)
            yield from (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    yield from (each for each in _json(folder / "added_tokens.json").values() if isinstance(each, int))
    decoder = _json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    yield from (int(each) for each in decoder if each.isdecimal())


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _with_end(kind: str, folder: Path, end: str | None) -> tuple[Tokenizer, str | None]:
    """The tokenizer whose end of text is the folder's, else `end`, else the usual one, with a note."""
    plain = _try(kind, folder, None)
    refusals = []
    for named in _ends(folder):
        if not isinstance(plain, DataError) and named in (plain.eod, plain.piece(plain.eod)):
            return plain, None
        chosen = _try(kind, folder, _symbol(plain, named))
        if not isinstance(chosen, DataError):
            return chosen, None
        refusals.append(chosen)
    if not refusals and end is not None:
        return load_with_end(kind, str(folder), None, end)
    if isinstance(plain, DataError):
        raise plain
    told = f"{folder}: what ends a text there is not taken ({refusals[0]})" if refusals else None
    return plain, told and f"{told}; {plain.piece(plain.eod)!r} ends documents"


def _try(kind: str, folder: Path, end: str | None) -> Tokenizer | DataError:
    try:
        return load_tokenizer(kind, folder, eod=end)
    except DataError as error:
        return error


def _ends(folder: Path) -> Iterator[int | str]:
    """What the folder's files say, each an id or a symbol; of several the first."""
    for name in CONFIGS:
        content = _json(folder / name)
        for key in (END_ID, END):
            value = _first(content.get(key))
            if isinstance(value, int | str):
                yield value


def _first(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get("content")
    return value[0] if isinstance(value, list) and value else value


def _symbol(tokenizer: Tokenizer | DataError, named: int | str) -> str:
    """The symbol of an id; what the vocabulary does not have is refused by its number."""
    if isinstance(tokenizer, DataError) or not isinstance(named, int) or not 0 <= named < tokenizer.vocab_size:
        return str(named)
    return tokenizer.piece(named)


KEYS = ("tokenizer_type", "vocab_file", "merge_file")
REMEDY = "name it with --set tokenizer_type=HFTokenizer vocab_file=PATH (or another type), or put its file into {}"


class TokenizerLocation(NamedTuple):
    """Where a checkpoint's tokenizer may be.

    Attributes:
        folder: of the checkpoint.
        carried: what `Tokenizer.save` wrote beside the weights, or None.
        trained: its configuration.
        end: the symbol that ended documents in training wherever the vocabulary has it; None where no one symbol did.
    """

    folder: Path
    carried: Path | None
    trained: Config
    end: str | None = None


def find_tokenizer(
    place: TokenizerLocation, overrides: Mapping[str, Any] | Sequence[str] = (), files: Sequence[str | Path] = ()
) -> Found:
    """The tokenizer of a checkpoint, or None with the reason, by the rule above.

    Raises:
        CheckpointError: the tokenizer that overrides name has more ids than the embedding has rows.
        DataError: it cannot be opened, or the one that a checkpoint carries is damaged.
    """
    rows, given = place.trained.model.padded_vocab_size, given_values(overrides, files)
    named = {key: given.get(key, getattr(place.trained.data, key)) for key in KEYS}
    if (given.keys() & set(KEYS)) and _says_which(named):
        return _named(place, named, rows)
    if place.carried is not None:
        return Found(load_saved_tokenizer(place.carried), None)
    found = read_tokenizer(place.folder, rows, place.end)
    if found.tokenizer is not None:
        return found
    return _recorded(place, rows, found.note)


def known_tokens(place: TokenizerLocation, found: Found) -> int:
    """Rows of the embedding that stand for a token; those behind them pad the vocabulary, as far as anybody knows."""
    rows = place.trained.model.padded_vocab_size
    if found.tokenizer is None:
        return rows
    return min(rows, max(found.tokenizer.vocab_size, largest_named_id(place.folder) + 1))


def made_of(tokenizer: Tokenizer, folder: Path) -> bool:
    """Whether a tokenizer is made of files in a folder; the libraries may read one vocabulary a little differently."""
    sources = (tuple(folder / name for name in names) for _, names in KINDS)
    found = (b"".join(path.read_bytes() for path in paths) for paths in sources if all(map(Path.is_file, paths)))
    return any(hashlib.sha256(content).hexdigest() == tokenizer.fingerprint for content in found)


def _says_which(keys: Mapping[str, Any]) -> bool:
    return keys["vocab_file"] is not None or not needs_files(keys["tokenizer_type"])


def _named(place: TokenizerLocation, keys: Mapping[str, Any], rows: int) -> Found:
    tokenizer, note = load_with_end(**keys, end=place.end)
    if tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{keys['vocab_file'] or keys['tokenizer_type']}: has {tokenizer.vocab_size} ids, the embedding of "
            f"{place.folder} has {rows} rows; name the tokenizer that the model was trained with"
        )
    return Found(tokenizer, note)


def _recorded(place: TokenizerLocation, rows: int, reason: str | None) -> Found:
    """That of the checkpoint's own configuration; where there is none, why not."""
    keys = {key: getattr(place.trained.data, key) for key in KEYS}
    if not _says_which(keys):
        return Found(None, reason)
    told = f"its configuration records {keys['tokenizer_type']}" + (
        f" with vocab_file {keys['vocab_file']}" if keys["vocab_file"] else ""
    )
    try:
        tokenizer, note = load_with_end(**keys, end=place.end)
    except DataError as error:
        return Found(None, f"{reason}; {told}, which cannot be read here ({error}): {REMEDY.format(place.folder)}")
    if tokenizer.vocab_size > rows:
        return Found(None, f"{reason}; {told}, which has {tokenizer.vocab_size} ids for {rows} rows of the embedding")
    return Found(tokenizer, note)
