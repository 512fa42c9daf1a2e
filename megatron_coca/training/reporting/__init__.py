"""What a run tells of itself: its figures, where they go, what is odd, and traces of single steps."""

from megatron_coca.training.reporting.console import set_up_logging
from megatron_coca.training.reporting.monitor import Monitor, Reporters
from megatron_coca.training.reporting.sinks import METRICS, TIMINGS, JsonLines, RankFigures, StepFigures, run_folder

__all__ = [
    "METRICS",
    "TIMINGS",
    "JsonLines",
    "Monitor",
    "RankFigures",
    "Reporters",
    "StepFigures",
    "run_folder",
    "set_up_logging",
]
