"""Processes of this program: how a command starts another one, the open-file limit, and the exit of workers."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from pathlib import Path

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
