"""The command `megatron-coca evaluate`: a subcommand for each task, and subcommands for reports and suites.

PyTorch takes seconds to import, so only the subcommands that need it import it, after the options are read.
"""

import os
import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_coca.commands import command_parser
from megatron_coca.evaluation.declaration import Task
from megatron_coca.evaluation.options import add_device_options, job_count, label_and_path
from megatron_coca.evaluation.results import Result
from megatron_coca.evaluation.tasks import TASKS, function_of, measurements
from megatron_coca.support.arguments import local_path
from megatron_coca.support.errors import InputError, report
from megatron_coca.support.output import survive
from megatron_coca.support.plain_text import plain
from megatron_coca.work.parts import PART_HELP, part_of
from megatron_coca.work.settings import add_engine_options, engine_of
from megatron_coca.work.statuses import INTERRUPTED


@dataclass(frozen=True)
class Subcommand:
    """One subcommand of `megatron-coca evaluate`.

    Attributes:
        help: description in the command's help.
        add_arguments: function that declares the options.
        example: options for the example in the help.
        run: function that runs on the parsed options and returns the exit status. It imports the modules that it
            needs, and may raise InputError.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    example: str
    run: Callable[[Namespace], int]


def add_suite_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("suite", type=local_path, metavar="SUITE.yml", help="file with checkpoints and tasks; see configs/evaluation/")
    output = "output folder for results/ and report/; rerunning resumes"
    add("--output", required=True, type=local_path, metavar="DIR", help=output)
    checkpoint = (
        "path of one of the suite's checkpoints, or of any checkpoint if the suite accepts any; the default label is "
        "the name of the folder; repeat the option for each checkpoint"
    )
    add("--checkpoint", type=label_and_path, action="append", default=[], metavar="[LABEL=]DIR", help=checkpoint)
    add("--only", nargs="+", metavar="TASK", help="run only these entries of the suite's tasks")
    add(
        "--jobs",
        type=job_count,
        default=1,
        metavar="N",
        help="number of processes that share each task; default: %(default)s",
    )
    add("--part", type=part_of, metavar="I/N", help=f"measure only a part, and write no report; {PART_HELP}")
    add_device_options(parser)
    add_engine_options(parser)


def add_report_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "results",
        nargs="+",
        type=local_path,
        metavar="RESULTS",
        help="result files of megatron-coca evaluate, or folders of such files",
    )
    add("--output", required=True, type=local_path, metavar="DIR", help="folder for report.html and all other files")
    add("--title", default="Evaluation", help="title of the report")
    add("--baseline", metavar="LABEL", help="mark perplexities that differ significantly from this label's")
    papers = "add all published numbers, or none; default: those with the lengths and the protocol of the results"
    add("--papers", action=BooleanOptionalAction, help=papers)


def show(*results: Result) -> None:
    """Print results as the tables that a report shows, with one row for each result."""
    from megatron_coca.evaluation.report.build import tables_of_results

    print(plain(tables_of_results(results)), end="\n\n", flush=True)


def run_measurement(task: Task, args: Namespace) -> int:
    return int(function_of(task.measure)(args, show))


def run_report(args: Namespace) -> int:
    from megatron_coca.evaluation.report.build import PAGE, build_report

    print(plain(build_report(args.results, args.output, args.title, args.papers, baseline=args.baseline)))
    print(f"\nwrote {args.output / PAGE}, and report.md, figures, tables, numbers and a notebook in the same folder")
    return 0


def run_suite(args: Namespace) -> int:
    from megatron_coca.evaluation.suite import run

    return run(args)


OTHERS = {
    "report": Subcommand(
        "a page of results, and figures, tables and numbers for papers",
        add_report_options,
        "results --output results/report",
        run_report,
    ),
    "suite": Subcommand(
        "all tasks of a suite file on all of its checkpoints, and the report",
        add_suite_options,
        "configs/evaluation/checkpoint.yml --checkpoint CoCA=runs/350M_roformer_coca --output results/coca",
        run_suite,
    ),
}
"""Subcommands that are not tasks."""


def subcommands() -> dict[str, Subcommand]:
    """Return all subcommands, in the order of the help."""
    tasks = {
        name: Subcommand(task.help, task.add_options, task.example, partial(run_measurement, task))
        for name, task in TASKS.items()
    }
    return tasks | OTHERS


def example(*tasks: str) -> str:
    known = subcommands()
    lines = [f"    megatron-coca evaluate {task} {known[task].example}" for task in tasks]
    return "\n".join(["for example:", *lines])


def parser() -> ArgumentParser:
    """Return the parser of the command line."""
    description = "Evaluate a checkpoint of a training run or from Hugging Face."
    parser = command_parser("evaluate", description, example(*subcommands()))
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
        from megatron_coca.evaluation.suite import run_on

        return run_on(engine, args, sys.argv[1:] if arguments is None else list(arguments))
    measures = args.task in measurements()
    return run_task(
        args, divided=measures and (getattr(args, "jobs", 1) > 1 or getattr(args, "part", None) is not None)
    )


def run_task(args: Namespace, divided: bool = False) -> int:
    """Run the task selected by the parsed options, report errors, and return the exit status.

    With `divided`, the work is shared by `args.jobs` processes, or only its part `args.part` is done.
    """
    if getattr(args, "output", None) is not None:  # the results are also in files
        survive("stdout")
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars would write carriage returns into logs
    try:
        if args.task in measurements():
            from megatron_coca.evaluation.subject import with_choices

            args = with_choices(args)
        if divided:
            from megatron_coca.evaluation.jobs import run_jobs, run_part

            return (run_jobs if args.part is None else run_part)(args, run_task)
        return subcommands()[args.task].run(args)
    except InputError as error:
        report("evaluate", error)
        return error.status
    except KeyboardInterrupt:
        print("megatron-coca evaluate: interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
