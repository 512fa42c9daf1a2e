"""Key-value recall: the declaration of the task, and its measurement."""
