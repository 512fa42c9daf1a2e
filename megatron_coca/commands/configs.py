"""Copy the configuration files into a new folder. The files refer to each other as configs/...

megatron-coca configs copy configs
megatron-coca train configs/350M/roformer_coca.yml configs/cluster/a100x8.yml
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_coca.commands import command_parser
from megatron_coca.support.arguments import local_path

CONFIGS = Path(__file__).resolve().parents[1].joinpath("configs").resolve()
"""The configuration files. In a checkout this is a link to the folder `configs`; the wheel contains its files."""


def shipped(name: str) -> str:
    """Return the path of a configuration file, relative to the working folder if the file is in it."""
    path, here = CONFIGS / name, Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 if the files cannot be written."""
    parser = command_parser("configs", __doc__)
    parser.add_argument("copy", choices=["copy"], metavar="copy")
    parser.add_argument(
        "folder",
        metavar="DIR",
        type=local_path,
        help="new folder; name it configs, so that the files can find each other",
    )
    folder = parser.parse_args(arguments).folder
    try:
        shutil.copytree(CONFIGS, folder)
    except FileExistsError:
        print(f"megatron-coca configs: {folder}: exists already; name a new folder", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megatron-coca configs: {error}; name a new folder in a writable place", file=sys.stderr)
        return 2
    print(f"{folder}: {sum(path.is_file() for path in folder.rglob('*'))} files")
    return 0
