"""The error for invalid input, and the exit statuses of commands."""

import sys

from megatron_coca.support.plain_text import plain

FAILED = 1  # exit status: an error of the program or of the machine; a repetition may succeed
UNUSABLE = 2  # exit status: input that cannot be used, or files that cannot be written
UNAVAILABLE = 69  # exit status: the input is valid, but a service is not available; EX_UNAVAILABLE of sysexits.h


class InputError(Exception):
    """Invalid input. A command prints the message, which names the thing, the problem and the remedy, and exits with
    `status`.
    """

    status = UNUSABLE

    def __str__(self) -> str:
        return plain(super().__str__())


def report(name: str, error: InputError) -> None:
    """Print the error that ends the command `name`. If there are several problems, each begins a new line."""
    text = str(error)
    print(f"megatron-coca {name}:", text, sep="\n" if "\n" in text else " ", file=sys.stderr)
