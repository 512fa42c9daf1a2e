"""Errors of the data package."""

from megatron_coca.program import UNAVAILABLE, InputError


class DataError(InputError):
    """A corpus, tokenizer or shard cannot be used. The message names the file and the remedy."""


class StoreUnavailable(DataError):
    """An object store does not answer: the same command continues when it is back."""

    status = UNAVAILABLE


class OutOfMemory(DataError):
    """A record, or one shortly after it, does not fit in memory. The file itself may be valid."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"{place}: not enough memory for this record or those after it. Lower max_record_mib of the source, which "
            "skips and names longer records, use fewer --workers, or give the process more memory."
        )

    def __reduce__(self) -> tuple[type[DataError], tuple[str]]:
        return DataError, (str(self),)  # the message of another process must not be formatted again
