"""What all commands share: the errors that end one, and how it starts another."""

import sys
from pathlib import Path

MAIN = str(Path(__file__).with_name("__main__.py"))
"""`python MAIN train ...` is `megatron-coca train ...`, installed or in a checkout, from any working folder."""
PROGRAM = (sys.executable, "-u", MAIN)
UNUSABLE = 2  # exit status: input that cannot be used, or files that cannot be written
UNAVAILABLE = 69  # a service is away, and nothing is wrong with the input; EX_UNAVAILABLE of sysexits.h


class InputError(Exception):
    """Wrong input: a command prints the message, which names the thing, the place and the remedy, and exits with
    `status`.
    """

    status = UNUSABLE


def report(name: str, error: InputError) -> None:
    """Print why the command `name` ends; of several problems each begins a line."""
    text = str(error)
    print(f"megatron-coca {name}:", text, sep="\n" if "\n" in text else " ", file=sys.stderr)
