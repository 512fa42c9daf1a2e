"""The error for invalid input, and the exit statuses of commands."""

import errno
import os
import sys

from megatron_coca.support.plain_text import plain

FAILED = 1  # exit status: an error of the program or of the machine; a repetition may succeed
UNUSABLE = 2  # exit status: input that cannot be used, or files that cannot be written
UNAVAILABLE = 69  # exit status: the input is valid, but a service is not available; EX_UNAVAILABLE of sysexits.h

NO_SPACE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "your quota is used up: remove files, or ask for a larger quota",
    errno.EFBIG: "the file is larger than the limit of this shell (`ulimit -f`) or of the file system: raise it",
}
"""Errors of a disk that accepts no more data, each with the remedy."""


def why_not_written(error: Exception, elsewhere: str) -> str:
    """Return the end of a message about a file that cannot be written: the reason, and a remedy.

    `error` is an OSError, or a library's error that quotes an OSError. `elsewhere` is the remedy if another place would
    help, such as "name another folder".
    """
    number = getattr(error, "errno", None)
    number = number or next((number for number in NO_SPACE if os.strerror(number) in str(error)), None)
    remedies = [NO_SPACE[number], elsewhere] if number in NO_SPACE else [elsewhere]
    return f"cannot be written ({getattr(error, 'strerror', None) or error}); {', or '.join(remedies)}"


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
