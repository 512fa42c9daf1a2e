"""Command-line arguments of several commands: paths, and keys of config.json to ignore."""

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

GGUF = ".gguf"
"""End of the name of a file that contains a model in the format of llama.cpp."""


def expanded(text: str) -> str:
    """Return a path or URL with its leading `~` replaced by the home folder.

    A shell expands `~` only at the start of a word, and never in a YAML file.
    """
    return os.path.expanduser(text)


def local_path(text: str) -> Path:
    """Return a path with its leading `~` replaced by the home folder, as a Path."""
    return Path(expanded(text))


def add_ignore_option(parser: ArgumentParser) -> None:
    """Declare the option that `ignoring` reads."""
    ignored = "key to ignore in the config.json of a Hugging Face folder; repeat the option for each key"
    parser.add_argument("--ignore-key", action="append", default=[], metavar="NAME", dest="ignored_keys", help=ignored)


def ignoring(options: Namespace) -> list[str]:
    """Return the config override that the options `--ignore-key` mean, if there are any."""
    return [f"ignore_keys={json.dumps(options.ignored_keys)}"] if options.ignored_keys else []
