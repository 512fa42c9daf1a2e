"""The command line of evaluation: one subcommand for each task. Only the module of the task that runs is imported."""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from megatron_coca.evaluation import options
from megatron_coca.evaluation.results import Result
from megatron_coca.support.errors import InputError, report
from megatron_coca.support.plain_text import plain

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def show(result: Result) -> None:
    """Print the tables of a result as in a report."""
    from megatron_coca.evaluation.report import tables_of_result

    print(plain(tables_of_result(result)), end="\n\n", flush=True)


@dataclass(frozen=True)
class Task:
    """One subcommand of `megatron-coca evaluate`.

    Attributes:
        help: its line in the help.
        add_arguments: declares its options.
        example: options that the help shows.
        module: the module of this package with its function, imported only when the subcommand runs.
        function: gets the parsed options, and returns the exit status.
        measures: the function also gets `show`, to call with every result.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    example: str
    module: str
    function: str = "run"
    measures: bool = True

    def run(self, args: Namespace) -> int:
        """Return the exit status. Raises one of the errors that `main` reports."""
        function = getattr(import_module(f"megatron_coca.evaluation.{self.module}"), self.function)
        return int(function(args, show) if self.measures else function(args))


CHECKPOINT = "--checkpoint runs/350M_roformer_coca"
MEASUREMENTS = {
    "perplexity": Task(
        "sliding-window perplexity of a checkpoint",
        options.add_perplexity_options,
        f"{CHECKPOINT} --windows 512,1024,2048 --stride 512 --output results",
        "tasks.perplexity",
    ),
    "passkey": Task(
        "a number hidden in filler, by length",
        options.add_passkey_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "passkey",
    ),
    "recall": Task(
        "key-value recall by length and shift, and the scores of the heads that retrieve",
        options.add_recall_options,
        "--checkpoint runs/recall --output results",
        "tasks.recall",
    ),
    "needle": Task(
        "a sentence hidden in text, by length and depth",
        options.add_needle_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "needle",
    ),
    "ruler": Task(
        "RULER-style tasks: several facts, chains of facts",
        options.add_ruler_options,
        f"{CHECKPOINT} --tasks multi_key,variable_tracking --output results",
        "tasks.retrieval",
        "ruler",
    ),
    "lm-eval": Task(
        "tasks of lm-evaluation-harness",
        options.add_lm_eval_options,
        f"{CHECKPOINT} --tasks piqa,lambada_openai --output results",
        "tasks.lm_eval",
    ),
    "analyse": Task(
        "angles, falling scores and entropy of a checkpoint's attention",
        options.add_analyse_options,
        f"{CHECKPOINT} --lengths 512,2048 --output results",
        "tasks.attention_analysis",
    ),
}
"""Tasks of checkpoints that write result files; a suite may run any of them."""

TASKS = {
    **MEASUREMENTS,
    "speed": Task(
        "time and memory of position methods, side by side",
        options.add_speed_options,
        "--config configs/350M/roformer_coca.yml --lengths 512,2048 --methods rotary,coca",
        "tasks.speed",
    ),
    "report": Task(
        "tables, plots and one page of many results, next to published ones",
        options.add_report_options,
        "results --output results/report",
        "report",
        measures=False,
    ),
    "suite": Task(
        "all tasks of a file over all its checkpoints, and the report",
        options.add_suite_options,
        "configs/evaluation/checkpoint.yml --checkpoint CoCA=runs/350M_roformer_coca --output results/coca",
        "suite",
        measures=False,
    ),
}


def example(*tasks: str) -> str:
    lines = [f"    megatron-coca evaluate {task} {TASKS[task].example}" for task in tasks]
    return "\n".join(["for example:", *lines])


def parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(
        prog="megatron-coca evaluate",
        description="Evaluate a checkpoint of a run or of Hugging Face.",
        epilog=example(*TASKS),
        formatter_class=RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="task", required=True)
    for name, task in TASKS.items():
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

    It is 2 for an error of the user or a missing result, and 69 if an object store does not answer.
    """
    args = parser().parse_args(arguments)
    return run_task(args, divided=args.task in MEASUREMENTS and getattr(args, "jobs", 1) > 1)


def run_task(args: Namespace, divided: bool = False) -> int:
    """Run the task of parsed options, report errors, and return the exit status.

    `divided` shares the work among `args.jobs` processes.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries write carriage returns into logs
    try:
        if divided:
            return int(import_module("megatron_coca.evaluation.jobs").run_jobs(args, run_task))
        return TASKS[args.task].run(args)
    except InputError as error:
        report("evaluate", error)
        return error.status
    except KeyboardInterrupt:
        print("megatron-coca evaluate: interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
