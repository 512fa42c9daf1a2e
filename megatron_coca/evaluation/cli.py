"""The command line of evaluation: one subcommand for each task, whose module is imported only when it runs."""

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
    """Print the tables of a result as its report has them."""
    from megatron_coca.evaluation.report import tables_of_result

    print(plain(tables_of_result(result)), end="\n\n", flush=True)


@dataclass(frozen=True)
class Task:
    """One subcommand of `megatron-coca evaluate`: help text, option declarations, and the module of this package with
    the function that runs it. The module is imported only when the subcommand runs.

    A task that `measures` receives `show` to print each result with.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    module: str
    function: str = "run"
    measures: bool = True

    def run(self, args: Namespace) -> int:
        """Return the exit status. Raises one of the errors that `main` reports."""
        function = getattr(import_module(f"megatron_coca.evaluation.{self.module}"), self.function)
        return int(function(args, show) if self.measures else function(args))


PERPLEXITY = "sliding-window perplexity of a checkpoint"
PASSKEY = "a number hidden in filler, by length"
NEEDLE = "a sentence hidden in text, by length and depth"
RECALL = "key-value recall by length and shift, and the scores of the heads that retrieve"
RULER = "RULER-style tasks: several facts, chains of facts"
HARNESS = "tasks of lm-evaluation-harness"
ANALYSE = "angles, falling scores and entropy of a checkpoint's attention"
SPEED = "time and memory of position methods, side by side"
REPORT = "tables, plots and one page of many results, next to published ones"
SUITE = "all tasks of a file over all its checkpoints, and the report"
RETRIEVAL = "tasks.retrieval"
MEASUREMENTS = {
    "perplexity": Task(PERPLEXITY, options.add_perplexity_options, "tasks.perplexity"),
    "passkey": Task(PASSKEY, options.add_passkey_options, RETRIEVAL, "passkey"),
    "recall": Task(RECALL, options.add_recall_options, "tasks.recall"),
    "needle": Task(NEEDLE, options.add_needle_options, RETRIEVAL, "needle"),
    "ruler": Task(RULER, options.add_ruler_options, RETRIEVAL, "ruler"),
    "lm-eval": Task(HARNESS, options.add_lm_eval_options, "tasks.lm_eval"),
    "analyse": Task(ANALYSE, options.add_analyse_options, "tasks.attention_analysis"),
}
"""Tasks of checkpoints that write result files; a suite may run any of them."""

TASKS = {
    **MEASUREMENTS,
    "speed": Task(SPEED, options.add_speed_options, "tasks.speed"),
    "report": Task(REPORT, options.add_report_options, "report", measures=False),
    "suite": Task(SUITE, options.add_suite_options, "suite", measures=False),
}

CHECKPOINT = "--checkpoint runs/350M_roformer_coca"
EXAMPLES = {
    "perplexity": f"{CHECKPOINT} --windows 512,1024,2048 --stride 512 --output results",
    "passkey": f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
    "recall": "--checkpoint runs/recall --output results",
    "needle": f"{CHECKPOINT} --lengths 512,1024,2048 --output results",
    "ruler": f"{CHECKPOINT} --tasks multi_key,variable_tracking --output results",
    "lm-eval": f"{CHECKPOINT} --tasks piqa,lambada_openai --output results",
    "analyse": f"{CHECKPOINT} --lengths 512,2048 --output results",
    "speed": "--config configs/350M/roformer_coca.yml --lengths 512,2048 --methods rotary,coca",
    "report": "results --output results/report",
    "suite": "configs/evaluation/checkpoint.yml --checkpoint CoCA=runs/350M_roformer_coca --output results/coca",
}
"""Options of each task, for its help."""


def example(*tasks: str) -> str:
    lines = [f"    megatron-coca evaluate {task} {EXAMPLES[task]}" for task in tasks]
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
    """Run one task; the exit status is 2 if the user can correct something, or if a requested result is missing, and
    69 if an object store does not answer.
    """
    args = parser().parse_args(arguments)
    return run_task(args, divided=args.task in MEASUREMENTS and getattr(args, "jobs", 1) > 1)


def run_task(args: Namespace, divided: bool = False) -> int:
    """Run the task of parsed options, `divided` into `args.jobs` processes; returns the exit status, reports errors."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries below, which write carriage returns into logs
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
