"""Trains several runs one after the other, each from the weights of the one before it.

    python tools/train_stages.py configs/finetune/llama7b_coca_stage{1,2,3}.yml --with configs/cluster/a100x32.yml

The same command goes on where it was interrupted. The exit status is that of train.py (docs/faults.md).
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.checkpoints import CheckpointError  # noqa: E402
from megatron_coca.config import ConfigError  # noqa: E402
from megatron_coca.training.chain import plan, run_chain, train_in_a_process  # noqa: E402


def build_parser() -> ArgumentParser:
    """The stages, and what they share."""
    parser = ArgumentParser(prog="train_stages.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE.yml", help="a file for each run, in their order")
    parser.add_argument(
        "--with",
        nargs="+",
        default=[],
        dest="shared",
        metavar="MORE.yml | key=value",
        help="given to every run after its own file, for example num_gpus=8",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where there is something to put right."""
    args = build_parser().parse_args(arguments)
    try:
        return run_chain(plan(args.stages, args.shared), train_in_a_process(ROOT / "train.py"))
    except (CheckpointError, ConfigError) as error:
        print(f"train_stages.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
