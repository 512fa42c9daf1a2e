"""Evaluation tasks: the measurement, the command and the result file of each task."""
