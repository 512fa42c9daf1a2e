"""The subcommands of `megatron-coca`: each module has `main(arguments) -> exit status`.

`cli` reports the InputError that a command raises.
"""

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter


def command_parser(name: str, description: str | None, epilog: str | None = None) -> ArgumentParser:
    """A parser for `megatron-coca NAME`, whose help keeps the line breaks of these texts."""
    return ArgumentParser(
        prog=f"megatron-coca {name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )


def count(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return value
