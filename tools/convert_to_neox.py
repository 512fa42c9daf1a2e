"""Write a checkpoint as a save folder that GPT-NeoX loads; see docs/checkpoints.md, "GPT-NeoX checkpoints".

python tools/convert_to_neox.py runs/350M_roformer_coca exports/neox --model-parallel-size 2
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_coca.checkpoints import CheckpointError
from megatron_coca.checkpoints.exports.neox import export_neox
from megatron_coca.checkpoints.weights import DTYPES
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="convert_to_neox.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a run's save folder, one step of it, or a Hugging Face folder")
    add("folder", metavar="FOLDER", help="folder to write; must not exist")
    changes = "config overrides, e.g. rope_scaling=null"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides", help=changes)
    add("--dtype", choices=DTYPES, help="dtype of the weights; default: as saved")
    add("--model-parallel-size", type=int, default=1, metavar="N", help="number of tensor-parallel ranks; default: 1")
    stages = "1 for any number of pipeline stages, 0 for none; default: 1"
    add("--pipe-parallel-size", type=int, choices=(0, 1), default=1, help=stages)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 2 for an error that the user can fix."""
    args = build_parser().parse_args(arguments)
    division = args.model_parallel_size, args.pipe_parallel_size
    try:
        done = export_neox(args.checkpoint, args.folder, args.overrides, args.dtype, *division)
    except (CheckpointError, ConfigError, DataError) as error:
        print(f"convert_to_neox.py: {error}", file=sys.stderr)
        return 2
    print(f"{done.folder}: load it with `load: {done.folder}` and `finetune: true`")
    if done.foreign:
        print(f"convert_to_neox.py: stock GPT-NeoX does not know its {', '.join(done.foreign)}", file=sys.stderr)
    if done.note is not None:
        print(f"convert_to_neox.py: {done.note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
