"""LongPPL: the declaration of the task, and its measurement."""
