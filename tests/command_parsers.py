"""The parsers of commands. argparse has no public way to their subcommands."""

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """The parser and those of its subcommands, at every depth; one with several names once."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from parsers(each)
