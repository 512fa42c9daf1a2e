"""The command line of a run: files by GPT-NeoX's rules, `key=value` overrides, and hints for unknown options."""

import os
from collections.abc import Sequence

from megatron_coca.config.load import KNOWN
from megatron_coca.config.neox_keys import HUGGING_FACE
from megatron_coca.config.source import normalise

SUFFIXES = (".yml", ".yaml", ".json")


def split_inputs(inputs: Sequence[str], folder: str | None = None) -> tuple[list[str], list[str]]:
    """Divide the inputs into configuration files and `key=value` overrides.

    As in GPT-NeoX, file names are relative to `folder`, if it is given, and need no `.yml`: `125M`.
    """
    names = [os.path.join(folder or "", text) for text in inputs if "=" not in text]
    return [_with_suffix(name) for name in names], [text for text in inputs if "=" in text]


def _with_suffix(name: str) -> str:
    named = f"{name}.yml"
    return name if name.endswith(SUFFIXES) or (os.path.exists(name) and not os.path.exists(named)) else named


def option_hint(unknown: Sequence[str], arguments: Sequence[str]) -> str:
    """Return how to write those unknown options that are keys (`--train_iters 10`), or an empty string."""
    hints = []
    for option in unknown:
        name, _, value = option.lstrip("-").partition("=")
        key = normalise(name) if normalise(name) in KNOWN else HUGGING_FACE.get(normalise(name))
        following = arguments[arguments.index(option) + 1 :][:1]
        if not value and following and not following[0].startswith("-") and not following[0].endswith(SUFFIXES):
            value = following[0].partition("=")[0]
        hints += [f"`{key}={value or 'VALUE'}`"] if key is not None else []
    return f"; keys have no dashes: write {' '.join(hints)}" if hints else ""
