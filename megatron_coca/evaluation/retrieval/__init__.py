"""Retrieval: finding information far back in the context."""
