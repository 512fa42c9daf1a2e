"""Angles, scores and entropy of attention: what is known of the task, and its measurement."""
