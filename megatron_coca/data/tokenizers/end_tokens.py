"""Find the end-of-text symbol that the files next to a tokenizer define."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_coca.data.errors import DataError
from megatron_coca.support.regular_files import inside, read_regular

NAMED_IN = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
)
"""The files of a Hugging Face folder that name the end-of-text symbol, each with the key of the symbol, in order of
preference.
"""


TOKENIZER_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Tokenizer and generation files of a Hugging Face folder."""


def check_links(
    folder: Path, error: Callable[[str], Exception] = DataError, named: Collection[str | Path | None] = ()
) -> None:
    """Raise `error` if a tokenizer file of a folder is a link that leads out of the folder. The files in `named` are
    not checked, because the user chose them.
    """
    exempt = [Path(file) for file in named if file is not None]
    for name in TOKENIZER_FILES:
        if folder / name not in exempt:
            inside(folder, name, error)


def named_ends(folder: Path) -> Iterator[int | str]:
    """Yield the symbols or ids that end texts, file by file. If a value is a list, all of its entries are yielded."""
    for name, key in NAMED_IN:
        value = read_object(folder / name).get(key)
        for each in value if isinstance(value, list) else [value]:
            # The entry may be an object with the symbol and its settings.
            symbol = each.get("content") if isinstance(each, Mapping) else each
            if isinstance(symbol, int | str) and not isinstance(symbol, bool) and symbol != "":
                yield symbol


def with_text_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json, completed with the keys that only its section `text_config` has.

    A model that also reads images may have the ids of special tokens only in this section.
    """
    inner = config.get("text_config")
    given = {name: value for name, value in config.items() if value is not None}
    return {**inner, **given} if isinstance(inner, Mapping) else dict(config)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty object if the file is missing, unreadable or contains no object."""
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
