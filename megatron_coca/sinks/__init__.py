"""Sinks of metrics: the console, files and services. Each is one class in one file, which declares it."""

from megatron_coca.sinks import comet, mlflow, tensorboard, wandb  # declare the sinks
from megatron_coca.sinks.declaration import (
    SINKS,
    Metrics,
    MetricSink,
    RunFacts,
    SentSteps,
    SinkOption,
    SinkSetupError,
    register_sink,
)
