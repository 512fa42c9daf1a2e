"""Subcommands of `megatron-coca`. Each module has `main(arguments)`, which returns the exit status.

`cli` catches an InputError that a command raises, and prints it.
"""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter

from megatron_coca.support.arguments import HintingParser


def command_parser(name: str, description: str | None, epilog: str | None = None) -> ArgumentParser:
    """Return a parser for `megatron-coca NAME`. Its help keeps the line breaks of `description` and `epilog`."""
    return HintingParser(
        prog=f"megatron-coca {name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )


def count(text: str) -> int:
    """Convert the text of an argparse argument to an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return value
