"""Tasks of lm-evaluation-harness: what is known of the task, and its measurement."""
