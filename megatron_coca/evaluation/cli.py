"""The `megatron-coca evaluate` command: one subcommand per task. Only the module of the requested task is imported."""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from megatron_coca.cluster import engine_of
from megatron_coca.evaluation import options
from megatron_coca.evaluation.results import Result
from megatron_coca.support.arguments import HintingParser
from megatron_coca.support.errors import InputError, report
from megatron_coca.support.plain_text import plain

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def show(*results: Result) -> None:
    """Print results as the tables that a report shows, with one row for each result."""
    from megatron_coca.evaluation.report import tables_of_results

    print(plain(tables_of_results(results)), end="\n\n", flush=True)


@dataclass(frozen=True)
class Task:
    """One subcommand of `megatron-coca evaluate`.

    Attributes:
        help: description of the task in the command's help.
        add_arguments: function that declares the task's options.
        example: options for the example in the help.
        module: module of this package that defines `function`; imported only when the subcommand runs.
        function: name of the function that runs the task on the parsed options and returns the exit status.
        measures: whether `function` also takes `show`, which it calls with its results.
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
    "longppl": Task(
        "perplexity of the tokens that need a long context, by length",
        options.add_longppl_options,
        f"{CHECKPOINT} --lengths 8192,16384 --evaluator models/llama-3.1-8b --data books --output results",
        "tasks.longppl",
    ),
    "passkey": Task(
        "retrieval of a number hidden in filler, by length",
        options.add_passkey_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "passkey",
    ),
    "recall": Task(
        "key-value recall by length and shift, and attention scores by head",
        options.add_recall_options,
        "--checkpoint runs/recall --output results",
        "tasks.recall",
    ),
    "needle": Task(
        "retrieval of a sentence hidden in text, by length and depth",
        options.add_needle_options,
        f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
        "tasks.retrieval",
        "needle",
    ),
    "ruler": Task(
        "RULER-style retrieval of several facts or of a chain of facts",
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
        "initial angles, score decay and entropy of a checkpoint's attention",
        options.add_analyse_options,
        f"{CHECKPOINT} --lengths 512,2048 --output results",
        "tasks.attention_analysis",
    ),
}
"""Tasks that measure a checkpoint and write result files. A suite can run any of them."""

TASKS = {
    **MEASUREMENTS,
    "speed": Task(
        "time and memory of position methods, side by side",
        options.add_speed_options,
        "--config configs/350M/roformer_coca.yml --lengths 512,2048 --methods rotary,coca",
        "tasks.speed",
    ),
    "report": Task(
        "a page of results, and figures, tables and numbers for papers",
        options.add_report_options,
        "results --output results/report",
        "report",
        measures=False,
    ),
    "suite": Task(
        "all tasks of a suite file on all of its checkpoints, and the report",
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
    """Return the parser of the command line."""
    parser = HintingParser(
        prog="megatron-coca evaluate",
        description="Evaluate a checkpoint of a training run or from Hugging Face.",
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

    The status is 2 after a user error or a missing result, and 69 if an object store does not answer.
    """
    args = parser().parse_args(arguments)
    if args.task == "suite" and (engine := engine_of(args)) is not None:
        given = sys.argv[1:] if arguments is None else list(arguments)
        return int(import_module("megatron_coca.evaluation.suite").run_on(engine, args, given))
    measures = args.task in MEASUREMENTS
    return run_task(
        args, divided=measures and (getattr(args, "jobs", 1) > 1 or getattr(args, "part", None) is not None)
    )


def run_task(args: Namespace, divided: bool = False) -> int:
    """Run the task selected by the parsed options, report errors, and return the exit status.

    If `divided` is set, `args.jobs` processes share the work, or only the part `args.part` of it is done.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars would write carriage returns into logs
    try:
        if args.task in MEASUREMENTS:
            args = import_module("megatron_coca.evaluation.subject").with_choices(args)
        if divided:
            jobs = import_module("megatron_coca.evaluation.jobs")
            return int((jobs.run_jobs if args.part is None else jobs.run_part)(args, run_task))
        return TASKS[args.task].run(args)
    except InputError as error:
        report("evaluate", error)
        return error.status
    except KeyboardInterrupt:
        print("megatron-coca evaluate: interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
