"""Processes of this program: how one starts another, output and messages, the open-file limit, the exit of workers."""

import os
import resource
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TextIO

MAIN = str(Path(__file__).parents[1] / "__main__.py")
"""`python MAIN train ...` is `megatron-coca train ...`, installed or in a checkout, from any working folder."""
PROGRAM = (sys.executable, "-u", MAIN)

OPEN_FILES = 1 << 16
"""The desired limit of open files, which is more than any run needs. A shard needs two."""
TOO_MANY_FILES = (
    "too many open files; raise the limit of this shell with `ulimit -n 65536` (in a job script too; administrators "
    "set it in /etc/security/limits.conf), or join shards"
)


def exit_status(status: int) -> int:
    """Return the exit status of a child process as a shell does: 128 + n after signal n (-n in `subprocess`)."""
    return 128 - status if status < 0 else status


def allow_open_files() -> None:
    """Raise this process's open-file limit, usually 1,024, to OPEN_FILES or the system's maximum if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_missing_streams() -> None:
    """Write output nowhere if the shell closed it (`>&-`), where Python has no stream."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)


def drop_closed_streams() -> bool:
    """Return whether a program that reads the output or the messages has ended. The rest is then written nowhere."""
    closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
    for stream in closed:
        drop_output(stream)
    return bool(closed)


def drop_output(stream: TextIO) -> None:
    """Write the rest of a stream nowhere, unless it has no descriptor, as in a notebook."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_closed(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)  # errors are always reported
    except (OSError, ValueError):
        return False
    return bool(poll.poll(0))


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep Python processes that are started inside the block from importing modules from the working folder.

    The folder may be a download, and processes started by multiprocessing would search it first.
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


def exit_with_parent() -> None:
    """End this process when its parent is killed.

    A worker runs this function in a thread, because the worker would otherwise wait for work forever.
    """
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
