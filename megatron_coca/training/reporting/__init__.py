"""Reporting of a run: figures and their sinks, anomalies, and profiler traces."""

from megatron_coca.training.reporting.monitor import Monitor
from megatron_coca.training.reporting.sinks import METRICS, run_folder

__all__ = ["METRICS", "Monitor", "run_folder"]
