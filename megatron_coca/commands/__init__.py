"""Subcommands of `megatron-coca`. Each module has `main(arguments)`, which returns the exit status.

`cli` reports an InputError that a command raises.
"""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter


def command_parser(name: str, description: str | None, epilog: str | None = None) -> ArgumentParser:
    """Return a parser for `megatron-coca NAME`. Its help keeps the line breaks of the texts."""
    return ArgumentParser(
        prog=f"megatron-coca {name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )


def count(text: str) -> int:
    """Return an integer of at least 1. A type of an argparse argument."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return value
