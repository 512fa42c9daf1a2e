"""The command line of evaluation: one subcommand for each task, whose module is imported only when it runs."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module

from megatron_coca.evaluation import options
from megatron_coca.evaluation.options import Task
from megatron_coca.evaluation.results import EvaluationError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def imported(module: str, function: str = "run") -> Callable[[Namespace], int]:
    """Return a function that imports `module` of this package and calls its `function`."""
    return lambda args: getattr(import_module(f"megatron_coca.evaluation.{module}"), function)(args)


PERPLEXITY = "sliding-window perplexity of a checkpoint"
NEEDLE = "a sentence hidden in text, by length and depth"
RULER = "RULER-style tasks: several facts, chains of facts, frequent words"
ANALYSE = "angles, borders, decay and entropy of a checkpoint's attention"
SPEED = "time and memory of position methods, side by side"
REPORT = "tables, plots and one page of many results, next to published ones"
SUITE = "all tasks of a file over all its checkpoints, and the report"
RETRIEVAL = "retrieval.measuring"
MEASUREMENTS = {
    "perplexity": Task(PERPLEXITY, options.add_perplexity_options, imported("perplexity")),
    "passkey": Task(
        "a number hidden in filler, by length", options.add_passkey_options, imported(RETRIEVAL, "passkey")
    ),
    "needle": Task(NEEDLE, options.add_needle_options, imported(RETRIEVAL, "needle")),
    "ruler": Task(RULER, options.add_ruler_options, imported(RETRIEVAL, "ruler")),
    "lm-eval": Task("tasks of lm-evaluation-harness", options.add_lm_eval_options, imported("harness.measuring")),
    "analyse": Task(ANALYSE, options.add_analyse_options, imported("analysis.measuring")),
    "speed": Task(SPEED, options.add_speed_options, imported("speed.measuring"), of_checkpoint=False),
}
"""Tasks that write result files; a suite may run any of them."""

TASKS = {
    **MEASUREMENTS,
    "report": Task(REPORT, options.add_report_options, imported("report")),
    "suite": Task(SUITE, options.add_suite_options, imported("suite")),
}


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="evaluate.py", description="Evaluate a checkpoint of a run or of Hugging Face.")
    subparsers = parser.add_subparsers(dest="task", required=True)
    for name, task in TASKS.items():
        task.add_arguments(subparsers.add_parser(name, help=task.help, description=task.help, allow_abbrev=False))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one task; the exit status is 2 if the user can correct something, or if a requested result is missing."""
    args = build_parser().parse_args(arguments)
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries below, which write carriage returns into logs
    from megatron_coca.attention.inputs import BackendError
    from megatron_coca.checkpoints import CheckpointError
    from megatron_coca.config import ConfigError
    from megatron_coca.data import DataError

    try:
        return TASKS[args.task].run(args)
    except (ConfigError, DataError, CheckpointError, BackendError, EvaluationError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate.py: interrupted; run the same command again to resume", file=sys.stderr)
        return INTERRUPTED
