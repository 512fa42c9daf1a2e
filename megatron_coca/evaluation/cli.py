"""The command line of evaluation: one subcommand for each task."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from megatron_coca.evaluation.tasks import TASKS, USER_ERRORS

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""


def build_parser() -> ArgumentParser:
    """Every task with its options."""
    parser = ArgumentParser(prog="evaluate.py", description="Evaluate a checkpoint of a run or of Hugging Face.")
    subparsers = parser.add_subparsers(dest="task", required=True)
    for name, task in TASKS.items():
        task.add_arguments(subparsers.add_parser(name, help=task.help, description=task.help, allow_abbrev=False))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 where the user has something to put right, or something asked for is missing."""
    args = build_parser().parse_args(arguments)
    try:
        return TASKS[args.task].run(args)
    except USER_ERRORS as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate.py: interrupted; the same command goes on where it was", file=sys.stderr)
        return INTERRUPTED
