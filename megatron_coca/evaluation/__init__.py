"""Evaluation of checkpoints at their training length and far beyond it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_coca.evaluation.results import EvaluationError

if TYPE_CHECKING:
    from megatron_coca.evaluation.report.build import build_report
    from megatron_coca.evaluation.tasks.perplexity.measure import sliding_window_perplexity
    from megatron_coca.evaluation.tasks.perplexity.task import PerplexityResult, WindowResult

__all__ = ["EvaluationError", "PerplexityResult", "WindowResult", "build_report", "sliding_window_perplexity"]


def __getattr__(name: str) -> Any:
    # Names are imported on first use (PEP 562), so that the command line prints its help without importing PyTorch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "report.build" if name == "build_report" else "tasks.perplexity.measure"
    return getattr(import_module(f"{__name__}.{module}"), name)
