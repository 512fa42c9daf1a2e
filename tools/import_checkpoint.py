"""Import a Hugging Face folder, or any other readable checkpoint; see docs/checkpoints.md, "Import".

python tools/import_checkpoint.py models/pythia-410m runs/pythia --set pos_emb=coca
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.importing import import_checkpoint
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError


def build_parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(
        prog="import_checkpoint.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a Hugging Face folder, or any other checkpoint that can be evaluated")
    add("folder", metavar="FOLDER", help="folder to write; must not exist")
    changes = "config overrides, e.g. pos_emb=coca for GPT-NeoX folders of CoCA's authors"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes)
    add("--dtype", choices=DTYPES, help="dtype of the weights; default: as in the source")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 for an error that the user can fix."""
    args = build_parser().parse_args(arguments)
    try:
        done = import_checkpoint(args.source, args.folder, args.overrides, args.dtype)
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"import_checkpoint.py: {error}", file=sys.stderr)
        return 2
    print(f"{done.folder}: {done.parameters:,} parameters, pos_emb {done.config.position.pos_emb}, weights only")
    for note in filter(None, (done.tokenizer_note, done.behaviour_note)):
        print(f"import_checkpoint.py: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
