"""Sliding-window perplexity: the declaration of the task, and its measurement."""
