"""The error of wrong input, and the exit statuses of commands."""

import sys

from megatron_coca.support.plain_text import plain

UNUSABLE = 2  # exit status: input that cannot be used, or files that cannot be written
UNAVAILABLE = 69  # exit status: a service is not available, and the input is fine; EX_UNAVAILABLE of sysexits.h


class InputError(Exception):
    """Wrong input. A command prints the message, which names the thing, the problem and the remedy, and exits with
    `status`.
    """

    status = UNUSABLE

    def __str__(self) -> str:
        return plain(super().__str__())


def report(name: str, error: InputError) -> None:
    """Print the error that ends the command `name`. Each of several problems begins a line."""
    text = str(error)
    print(f"megatron-coca {name}:", text, sep="\n" if "\n" in text else " ", file=sys.stderr)
