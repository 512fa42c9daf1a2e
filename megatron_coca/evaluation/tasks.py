"""What `evaluate.py` can do."""

from functools import partial

from megatron_coca.attention.inputs import BackendError
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError
from megatron_coca.evaluation.analysis.command import ANALYSE
from megatron_coca.evaluation.harness.command import LM_EVAL
from megatron_coca.evaluation.perplexity.command import PERPLEXITY
from megatron_coca.evaluation.report import REPORT
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.retrieval.commands import NEEDLE, PASSKEY, RULER
from megatron_coca.evaluation.running import Task
from megatron_coca.evaluation.speed.command import SPEED
from megatron_coca.evaluation.suite import command as suite

USER_ERRORS = (ConfigError, DataError, CheckpointError, BackendError, EvaluationError)
"""Errors that are told in one message, without a traceback."""

MEASUREMENTS = {
    "perplexity": PERPLEXITY,
    "passkey": PASSKEY,
    "needle": NEEDLE,
    "ruler": RULER,
    "lm-eval": LM_EVAL,
    "analyse": ANALYSE,
    "speed": SPEED,
}
"""What writes result files; a suite may ask for any of them."""

SUITE = Task(
    "all tasks of a file over all its checkpoints, and the report",
    suite.add_arguments,
    partial(suite.run_suite, tasks=MEASUREMENTS),
)

TASKS = {**MEASUREMENTS, "report": REPORT, "suite": SUITE}
"""Every subcommand by its name."""
