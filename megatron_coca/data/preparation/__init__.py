"""Preparation of shards from documents: parallel, restartable, without duplicates, in bounded memory."""
