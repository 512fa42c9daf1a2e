"""The command line of evaluation: one subcommand for each task."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from megatron_coca.attention.inputs import BackendError
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError
from megatron_coca.evaluation import analysis, report
from megatron_coca.evaluation import suite as suite
from megatron_coca.evaluation.harness.measuring import LM_EVAL
from megatron_coca.evaluation.perplexity import PERPLEXITY
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.retrieval.measuring import NEEDLE, PASSKEY, RULER
from megatron_coca.evaluation.speed import command as speed
from megatron_coca.evaluation.subject import Task

USER_ERRORS = (ConfigError, DataError, CheckpointError, BackendError, EvaluationError)
"""Errors that are told in one message, without a traceback."""

MEASUREMENTS = {
    "perplexity": PERPLEXITY,
    "passkey": PASSKEY,
    "needle": NEEDLE,
    "ruler": RULER,
    "lm-eval": LM_EVAL,
    "analyse": Task(analysis.HELP, analysis.add_arguments, analysis.run),
    "speed": Task(speed.HELP, speed.add_arguments, speed.run, of_checkpoint=False),
}
"""What writes result files; a suite may ask for any of them."""

SUITE = Task(
    "all tasks of a file over all its checkpoints, and the report",
    suite.add_arguments,
    partial(suite.run_suite, tasks=MEASUREMENTS),
)

TASKS = {**MEASUREMENTS, "report": Task(report.HELP, report.add_arguments, report.run), "suite": SUITE}
"""Every subcommand by its name."""

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
