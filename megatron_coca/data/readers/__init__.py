"""Readers: corpora as they are distributed, to a stream of documents."""
