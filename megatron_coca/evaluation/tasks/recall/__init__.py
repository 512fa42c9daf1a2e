"""Key-value recall: what is known of the task, and its measurement."""
