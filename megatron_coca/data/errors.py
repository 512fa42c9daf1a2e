"""Errors of the data package."""

from megatron_coca.support.errors import UNAVAILABLE, InputError


class DataError(InputError):
    """A corpus, tokenizer or shard cannot be used. The message names the file and says how to fix the problem."""


class StoreUnavailable(DataError):
    """An object store does not respond. The same command resumes once the store is available again."""

    status = UNAVAILABLE
