"""Worker processes of multiprocessing, and pools of these processes: from where they import, and how they end."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING

from megatron_coca.support.output import survive

if TYPE_CHECKING:  # every command imports this file, and few need a pool
    from concurrent.futures import ProcessPoolExecutor


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


def begin_worker() -> None:
    """Prepare this worker process, which multiprocessing has started. It ends when its parent is killed, because it
    would otherwise wait for work forever. It continues even if nobody can read its output.
    """
    survive("stdout", "stderr")
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _start(initializer: Callable[[], None]) -> None:
    begin_worker()
    initializer()


def process_pool(workers: int, initializer: Callable[[], None]) -> "ProcessPoolExecutor":
    """Return a pool of processes that end when this process is killed. Each of them calls `initializer` first.

    Ctrl-C reaches the whole process group. Workers inherit a handler that ignores Ctrl-C, and this process ends them.
    """
    from concurrent.futures import ProcessPoolExecutor

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    try:
        with safe_path():
            pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start, initargs=(initializer,))
            pool.submit(int)  # starts a worker process
            return pool
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


def end_pool(pool: "ProcessPoolExecutor") -> None:
    """End worker processes at once, even while they work on an item. An unfinished item has no result, and its lock is
    released.
    """
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(cancel_futures=True)
