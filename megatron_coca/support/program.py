"""What all commands share: the errors that end one, and how it starts another."""

import os
import resource
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from pathlib import Path

from megatron_coca.support.plain_text import plain

MAIN = str(Path(__file__).parents[1] / "__main__.py")
"""`python MAIN train ...` is `megatron-coca train ...`, installed or in a checkout, from any working folder."""
PROGRAM = (sys.executable, "-u", MAIN)
UNUSABLE = 2  # exit status: input that cannot be used, or files that cannot be written
UNAVAILABLE = 69  # a service is away, and nothing is wrong with the input; EX_UNAVAILABLE of sysexits.h


class InputError(Exception):
    """Wrong input: a command prints the message, which names the thing, the place and the remedy, and exits with
    `status`.
    """

    status = UNUSABLE

    def __str__(self) -> str:
        return plain(super().__str__())


OPEN_FILES = 1 << 16
"""More than any run needs: two for each shard."""
TOO_MANY_FILES = (
    "too many open files; raise the limit of this shell with `ulimit -n 65536` (in a job script too; administrators "
    "set it in /etc/security/limits.conf), or join shards"
)


def allow_open_files() -> None:
    """Raise this process's limit of open files, usually 1,024, towards the one that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def safe_path() -> Iterator[None]:
    """Let Python processes that are started here import no module from the working folder, which may be a download:
    those of multiprocessing would look there first.
    """
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def report(name: str, error: InputError) -> None:
    """Print why the command `name` ends; of several problems each begins a line."""
    text = str(error)
    print(f"megatron-coca {name}:", text, sep="\n" if "\n" in text else " ", file=sys.stderr)


def expanded(text: str) -> str:
    """A path or URL with a leading `~` replaced by the home folder: a shell does so only at the start of a word, and a
    YAML file never. Also an argparse type.
    """
    return os.path.expanduser(text)


def local_path(text: str) -> Path:
    """An argparse type: `expanded` as a Path."""
    return Path(expanded(text))


def part_of(text: str) -> tuple[int, int]:
    """An argparse type: "2/8" as (1, 8), the part, counted from 0, and the number of parts."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ArgumentTypeError(f"{text:.20} is not I/N with I in 1 to N")
    return int(part) - 1, int(parts)


def exit_with_parent() -> None:
    """End this process when its parent was killed; for a thread of a worker, which would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
