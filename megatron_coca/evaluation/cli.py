"""The command line of evaluation: one subcommand for each task, whose module is imported only when it runs."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from importlib import import_module

from megatron_coca.evaluation import analysis, options, report
from megatron_coca.evaluation.options import Task
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.speed import command as speed

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def imported(module: str, function: str = "run") -> Callable[[Namespace], int]:
    """Return a function that imports `module` of this package and calls its `function`."""
    return lambda args: getattr(import_module(f"megatron_coca.evaluation.{module}"), function)(args)


MEASUREMENTS = {
    "perplexity": Task(
        "sliding-window perplexity of a checkpoint", options.add_perplexity_options, imported("perplexity")
    ),
    "passkey": Task(
        "a number hidden in filler, by length", options.add_passkey_options, imported("retrieval.measuring", "passkey")
    ),
    "needle": Task(
        "a sentence hidden in text, by length and depth",
        options.add_needle_options,
        imported("retrieval.measuring", "needle"),
    ),
    "ruler": Task(
        "RULER-style tasks: several facts, chains of facts, frequent words",
        options.add_ruler_options,
        imported("retrieval.measuring", "ruler"),
    ),
    "lm-eval": Task("tasks of lm-evaluation-harness", options.add_lm_eval_options, imported("harness.measuring")),
    "analyse": Task(analysis.HELP, analysis.add_arguments, analysis.run),
    "speed": Task(speed.HELP, speed.add_arguments, speed.run, of_checkpoint=False),
}
"""Tasks that write result files; a suite may run any of them."""

TASKS = {
    **MEASUREMENTS,
    "report": Task(report.HELP, report.add_arguments, report.run),
    "suite": Task(
        "all tasks of a file over all its checkpoints, and the report", options.add_suite_options, imported("suite")
    ),
}


def build_parser() -> ArgumentParser:
    """Return the parser of all tasks and their options."""
    parser = ArgumentParser(prog="evaluate.py", description="Evaluate a checkpoint of a run or of Hugging Face.")
    subparsers = parser.add_subparsers(dest="task", required=True)
    for name, task in TASKS.items():
        task.add_arguments(subparsers.add_parser(name, help=task.help, description=task.help, allow_abbrev=False))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one task; the exit status is 2 if the user can correct something, or if a requested result is missing."""
    args = build_parser().parse_args(arguments)
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
