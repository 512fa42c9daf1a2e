"""Errors of the data package."""

from megatron_coca.support.errors import UNAVAILABLE, InputError


class DataError(InputError):
    """A corpus, tokenizer or shard cannot be used. The message names the file and the remedy."""


class StoreUnavailable(DataError):
    """An object store does not answer: the same command continues when it is back."""

    status = UNAVAILABLE
