"""Retrieval: whether a model finds what is said far back in its context."""
