"""Measuring a checkpoint, at its training length and far beyond it."""

from megatron_coca.evaluation.perplexity import sliding_window_perplexity
from megatron_coca.evaluation.report import build_report
from megatron_coca.evaluation.results import EvaluationError, PerplexityResult, WindowResult

__all__ = ["EvaluationError", "PerplexityResult", "WindowResult", "build_report", "sliding_window_perplexity"]
