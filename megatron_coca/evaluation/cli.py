"""The `megatron-coca evaluate` command: one subcommand per task."""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from megatron_coca.evaluation.subcommands import measurements, subcommands
from megatron_coca.support.arguments import HintingParser
from megatron_coca.support.errors import InputError, report
from megatron_coca.support.output import survive
from megatron_coca.work.settings import engine_of
from megatron_coca.work.statuses import INTERRUPTED


def example(*tasks: str) -> str:
    known = subcommands()
    lines = [f"    megatron-coca evaluate {task} {known[task].example}" for task in tasks]
    return "\n".join(["for example:", *lines])


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    parser = HintingParser(
        prog="megatron-coca evaluate",
        description="Evaluate a checkpoint of a training run or from Hugging Face.",
        epilog=example(*subcommands()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="task", required=True)
    for name, task in subcommands().items():
        added = subparsers.add_parser(
            name,
            help=task.help,
            description=task.help,
            epilog=example(name),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        task.add_arguments(added)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one task and return the exit status.

    The status is 2 after a user error or a missing result, and 69 if an object store does not answer.
    """
    args = parser().parse_args(arguments)
    if args.task == "suite" and (engine := engine_of(args)) is not None:
        given = sys.argv[1:] if arguments is None else list(arguments)
        return int(import_module("megatron_coca.evaluation.suite").run_on(engine, args, given))
    measures = args.task in measurements()
    return run_task(
        args, divided=measures and (getattr(args, "jobs", 1) > 1 or getattr(args, "part", None) is not None)
    )


def run_task(args: Namespace, divided: bool = False) -> int:
    """Run the task selected by the parsed options, report errors, and return the exit status.

    If `divided` is set, `args.jobs` processes share the work, or only the part `args.part` of it is done.
    """
    if getattr(args, "output", None) is not None:  # the results are in files, too
        survive("stdout")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars would write carriage returns into logs
    try:
        if args.task in measurements():
            args = import_module("megatron_coca.evaluation.subject").with_choices(args)
        if divided:
            jobs = import_module("megatron_coca.evaluation.jobs")
            return int((jobs.run_jobs if args.part is None else jobs.run_part)(args, run_task))
        return subcommands()[args.task].run(args)
    except InputError as error:
        report("evaluate", error)
        return error.status
    except KeyboardInterrupt:
        print("megatron-coca evaluate: interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
