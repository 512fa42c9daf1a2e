"""Angles, scores and entropy of attention: the declaration of the task, and its measurement."""
