"""Ablations: a grid of training runs and evaluations from one YAML file; see docs/ablations.md."""
