"""Tasks of lm-evaluation-harness: the declaration of the task, and its measurement."""
