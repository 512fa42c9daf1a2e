"""What `evaluate.py` can do."""

from megatron_coca.attention.inputs import BackendError
from megatron_coca.checkpoints import CheckpointError
from megatron_coca.config import ConfigError
from megatron_coca.data import DataError
from megatron_coca.evaluation.perplexity.command import PERPLEXITY
from megatron_coca.evaluation.report import REPORT
from megatron_coca.evaluation.results import EvaluationError

USER_ERRORS = (ConfigError, DataError, CheckpointError, BackendError, EvaluationError)
"""Errors that are told in one message, without a traceback."""

TASKS = {
    "perplexity": PERPLEXITY,
    "report": REPORT,
}
"""Every subcommand by its name."""
