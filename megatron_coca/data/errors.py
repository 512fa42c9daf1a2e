"""The one error of the data floor."""


class DataError(Exception):
    """A corpus, tokenizer or shard cannot be used. The message names the file and the remedy."""
