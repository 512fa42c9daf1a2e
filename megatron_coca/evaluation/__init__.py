"""Measuring a checkpoint, at its training length and far beyond it."""

from megatron_coca.evaluation.perplexity import PerplexityResult, WindowResult, sliding_window_perplexity
from megatron_coca.evaluation.report import build_report
from megatron_coca.evaluation.results import EvaluationError

__all__ = ["EvaluationError", "PerplexityResult", "WindowResult", "build_report", "sliding_window_perplexity"]
