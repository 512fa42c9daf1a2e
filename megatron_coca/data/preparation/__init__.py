"""Prepare shards from documents, in parallel and in bounded memory. Duplicates are removed, and an interrupted
preparation can resume.
"""
