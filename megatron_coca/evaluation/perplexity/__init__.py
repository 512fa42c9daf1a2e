"""Sliding-window perplexity of documents, window size by window size."""

from megatron_coca.evaluation.perplexity.records import PerplexityResult, WindowResult
from megatron_coca.evaluation.perplexity.scoring import sliding_window_perplexity

__all__ = ["PerplexityResult", "WindowResult", "sliding_window_perplexity"]
