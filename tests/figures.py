"""Figures that a run reports."""

TIMINGS = frozenset(
    {
        "tokens_per_second",
        "tokens_per_second_per_device",
        "step_seconds",
        "tflops_per_device",
        "mfu",
        "peak_memory_gib",
        "data_wait",
        "save_share",
        "eval_share",
        "eta_seconds",
    }
)
"""Figures of time and memory, which differ between identical runs."""
