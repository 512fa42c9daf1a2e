"""The end of text that the files beside a tokenizer define."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_coca.support.regular_files import read_regular

NAMED_IN = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
)
"""Files of a Hugging Face folder and the key in each, in order of preference."""


def named_ends(folder: Path) -> Iterator[int | str]:
    """Yield the symbols or ids that end texts, file by file. A list in a file gives all of its entries."""
    for name, key in NAMED_IN:
        value = read_object(folder / name).get(key)
        for each in value if isinstance(value, list) else [value]:
            symbol = each.get("content") if isinstance(each, Mapping) else each  # a token with its settings
            if isinstance(symbol, int | str) and not isinstance(symbol, bool) and symbol != "":
                yield symbol


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if the file is missing, unreadable or not an object."""
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
