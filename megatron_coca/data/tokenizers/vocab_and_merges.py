"""The files of a byte-level tokenizer without a tokenizer.json: vocab.json, merges.txt, and the tokens added to them.

Qwen 2 and Phi 2 were often published with such files. tokenizer_config.json names the class that divides texts, and
added_tokens.json or tokenizer_config.json contains further tokens.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.data.tokenizers.end_tokens import read_object
from megatron_coca.support.regular_files import read_regular

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIVIDED = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ],
}
CLASSES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "GPT2Tokenizer": (None, _BYTES | {"use_regex": True}),
    "CodeGenTokenizer": (None, _BYTES | {"use_regex": True}),
    "Qwen2Tokenizer": ({"type": "NFC"}, _DIVIDED),
}
"""Maps the value of `tokenizer_class`, without `Fast`, to the (normalizer, pre-tokenizer) of tokenizer.json."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def has_files(folder: Path) -> bool:
    """Return True if a folder has vocab.json and merges.txt, but no tokenizer.json."""
    return all((folder / name).is_file() for name in (VOCABULARY, MERGES)) and not (folder / "tokenizer.json").exists()


def class_of(folder: Path) -> str:
    """Return the name of the class that divides texts. The default is GPT-2's class.

    Raises DataError for a class that divides texts in an unknown way.
    """
    named = read_object(folder / "tokenizer_config.json").get("tokenizer_class") or "GPT2Tokenizer"
    name = str(named).removesuffix("Fast")
    if name not in CLASSES:
        raise DataError(
            f"{folder}: tokenizer_config.json names {named}, and it is unknown how that class divides texts; write its "
            f'tokenizer.json with transformers: AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
        )
    return name


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    """Return the tokens that the files next to a vocabulary add to it, in the format of tokenizer.json and sorted by
    id.
    """
    settings = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
    named = [value for name, value in settings.items() if name.endswith("_token")]
    others = settings.get("additional_special_tokens")
    named += others if isinstance(others, list) else []
    special = {value.get("content") if isinstance(value, Mapping) else value for value in named}
    added = {
        token: {"content": content, "special": content in special, "normalized": content not in special}
        for content, token in read_object(folder / "added_tokens.json").items()
        if isinstance(token, int)
    }
    declared = settings.get("added_tokens_decoder")
    for token, entry in (declared if isinstance(declared, Mapping) else {}).items():
        if str(token).isdecimal() and isinstance(entry, Mapping) and isinstance(entry.get("content"), str):
            added[int(token)] = dict(entry)
    return [
        {"id": token, "content": entry["content"], "special": entry.get("special") is True}
        | {flag: entry.get(flag) is True for flag in _FLAGS}
        for token, entry in sorted(added.items())
    ]


def is_plain_gpt2(folder: Path) -> bool:
    """Return whether the two files describe the tokenizer completely: it has GPT-2's class and no added tokens. Raises
    DataError as `as_tokenizer_json` does.
    """
    vocabulary, _ = _vocabulary_and_merges(folder)
    return CLASSES[class_of(folder)] == CLASSES["GPT2Tokenizer"] and not _new_tokens(folder, vocabulary)


def as_tokenizer_json(folder: Path) -> bytes:
    """Return the content of a tokenizer.json for a folder for which `has_files` is True.

    Raises DataError for an unknown class, for files that do not contain a vocabulary and merges, and for added tokens
    with ids that do not follow the ids of the vocabulary.
    """
    normalizer, divided = CLASSES[class_of(folder)]
    vocabulary, lines = _vocabulary_and_merges(folder)
    size = max(vocabulary.values()) + 1
    for number, entry in enumerate(_new_tokens(folder, vocabulary)):
        if entry["id"] != size + number:
            raise DataError(
                f"{folder}: the added token {entry['content']!r} has id {entry['id']} instead of {size + number}, "
                "which follows the vocabulary; download the tokenizer's files again"
            )
    merges = [line for line in lines if line.strip() and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    added = added_tokens(folder)
    content = {"version": "1.0", "added_tokens": added, "normalizer": normalizer, "pre_tokenizer": divided}
    content |= {"post_processor": None, "decoder": _BYTES | {"use_regex": True}, "model": model}
    return json.dumps(content, ensure_ascii=False).encode()


def _vocabulary_and_merges(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and the lines of merges.txt."""
    try:
        vocabulary = json.loads(read_regular(folder / VOCABULARY))
        max(vocabulary.values()) + 1  # the ids are numbers
        return vocabulary, read_regular(folder / MERGES).decode().split("\n")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{folder}: {VOCABULARY} and {MERGES} cannot be read ({error}); check that the files are complete"
        ) from error


def _new_tokens(folder: Path, vocabulary: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the added tokens that are not in the vocabulary with the same id."""
    return [entry for entry in added_tokens(folder) if vocabulary.get(entry["content"]) != entry["id"]]
