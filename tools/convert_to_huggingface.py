"""Write a checkpoint as a folder that Hugging Face transformers loads; see docs/checkpoints.md, "Export".

python tools/convert_to_huggingface.py runs/350M_roformer_coca exports/350M_roformer_coca
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exports.huggingface import export
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="convert_to_huggingface.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a run's save folder, one step of it, or a Hugging Face folder")
    add("folder", metavar="FOLDER", help="folder to write; must not exist")
    changes = "config overrides, e.g. rope_scaling.rope_type=dynamic"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes)
    original = "copy tokenizer and generation files of a Hugging Face folder: the model's original"
    add("--tokenizer", metavar="FOLDER", help=original)
    add("--dtype", choices=DTYPES, help="dtype of the weights; default: as saved")
    add("--without-padding", action="store_true", help="omit the padding rows of the vocabulary")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 for an error that the user can fix."""
    args = build_parser().parse_args(arguments)
    try:
        done = export(
            args.checkpoint,
            args.folder,
            args.overrides,
            args.dtype,
            tokenizer=args.tokenizer,
            without_padding=args.without_padding,
        )
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"convert_to_huggingface.py: {error}", file=sys.stderr)
        return 2
    trust = ", loaded with trust_remote_code=True" if done.remote else ""
    print(f"{done.folder}: a {done.model_type} model for transformers{trust}")
    if done.tokenizer_note is not None:
        print(f"convert_to_huggingface.py: {done.tokenizer_note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
