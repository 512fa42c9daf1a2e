"""Evaluation tasks: what each measures, its command and its table."""
