"""Sliding-window perplexity: what is known of the task, and its measurement."""
