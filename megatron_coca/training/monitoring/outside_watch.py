"""A small child process that ends this process if it no longer answers, for example because C code keeps the GIL.

The child counts its own ticks and reads the state of this process from /proc, so a suspension of either
process (SIGSTOP, Ctrl-Z, Slurm's suspend) does not count. A timer in this process, such as faulthandler's, would expire
during a suspension.

The child runs this file as a program. The file imports only the standard library.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

STDERR = 2
END = signal.SIGALRM
"""The signal that ends this process. faulthandler answers it first, without the GIL: it writes the stacks."""
STOPPED = ("T", "t")
"""States in /proc of a process that is suspended, or that a debugger has stopped."""
LONGEST_TICK = 1.0


class OutsideWatch:
    """The child process. It ends this process by `END` if `beat` is not called for `limit` seconds.

    If the process has not ended `grace` seconds later, for example because nobody reads standard error, the child
    kills it.
    """

    def __init__(self, limit: float, grace: float, rank: int) -> None:
        faulthandler.register(END, file=STDERR, all_threads=True, chain=True)
        values = (os.getpid(), limit, grace, rank)
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__), *map(str, values)]
        # The child has a session of its own, so that signals to the group of this process do not reach it.
        self._process = subprocess.Popen(
            command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert self._process.stdin is not None
        self._beats = self._process.stdin.fileno()
        os.set_blocking(self._beats, False)

    def beat(self) -> None:
        """Tell the child that this process works."""
        with suppress(OSError):  # the child is suspended and its pipe is full, or somebody has killed it
            os.write(self._beats, b".")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        faulthandler.unregister(END)


def main(parent: int, limit: float, grace: float, rank: str) -> None:
    """Watch process `parent` until it closes its end of the pipe, which is standard input, or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends signals to all processes of a task
    tick = min(LONGEST_TICK, limit / 20)
    silent, before = 0.0, time.monotonic()
    while silent < limit:
        heard = select.select([sys.stdin], [], [], tick)[0]
        if os.getppid() != parent or (heard and not os.read(sys.stdin.fileno(), 1 << 16)):
            return
        now = time.monotonic()
        # A long gap means that this process was suspended, so it counts as at most two ticks.
        silent = 0.0 if heard else silent + (0.0 if is_suspended(parent) else min(now - before, 2 * tick))
        before = now
    if select.select([], [STDERR], [], 0)[1]:  # writing to a full pipe would keep the parent alive
        why = "probably because C code keeps Python's global lock"
        os.write(STDERR, f"rank {rank}: ended after no answer for {limit:g} s, {why}; its stacks:\n".encode())
    os.kill(parent, END)
    deadline = time.monotonic() + grace
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(tick)
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


def is_suspended(process: int) -> bool:
    """Return whether a process is suspended. Its state is the first word after its name, which is in parentheses."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in STOPPED
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
