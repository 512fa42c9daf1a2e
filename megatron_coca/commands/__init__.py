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
    """An argparse type: an integer from 1 to 2,147,483,647."""
    value = int(text)
    if not 1 <= value < 2**31:
        raise ArgumentTypeError(f"{text:.40}: must be at least 1 and at most {2**31 - 1:,}")
    return value
