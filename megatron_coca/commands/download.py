"""Download a model from the Hugging Face Hub and check that it can be used here.

megatron-coca download Qwen/Qwen3-0.6B                 # to models/Qwen3-0.6B
megatron-coca download Qwen/Qwen3-0.6B --output qwen

The same command continues an interrupted download. A model with restricted access needs `hf auth login` first.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.commands import command_parser
from megatron_coca.support.arguments import local_path
from megatron_coca.support.plain_text import plain
from megatron_coca.support.remote_files import HUB


def hub_name(text: str) -> str:
    """Convert the text of an argument to OWNER/NAME."""
    name = text.removeprefix(HUB)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ArgumentTypeError(f"{text!r} is not the name of a model on the hub, such as Qwen/Qwen3-0.6B")
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the model, print its size, and return 0, or 1 if its files are damaged. Raises CheckpointError."""
    parser = command_parser("download", __doc__)
    parser.add_argument("name", type=hub_name, metavar="OWNER/NAME", help="name of the model, with or without hf://")
    parser.add_argument("-o", "--output", type=local_path, metavar="FOLDER", help="default: models/NAME")
    args = parser.parse_args(arguments)
    folder = args.output or Path("models") / args.name.partition("/")[2]
    from megatron_coca.checkpoints.adapters import has_adapters
    from megatron_coca.checkpoints.hub import from_hub
    from megatron_coca.checkpoints.huggingface.read import is_huggingface_folder
    from megatron_coca.checkpoints.inspection import describe_other, describe_text

    from_hub(args.name, folder)
    if has_adapters(folder) and not is_huggingface_folder(folder):
        print(plain(f"{folder}: PEFT adapters; use them with --checkpoint {folder} --base MODEL"))
        return 0
    found = describe_other(folder, "Hugging Face folder")
    print(describe_text(found))
    return int(bool(found.damage))
