"""Build and control the library that fails file operations, kills at them, and shifts the wall clock (shim.c)."""

import ctypes
import fcntl
import hashlib
import mmap
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
BUILT = Path(__file__).parents[2] / "build" / "soak"
COMPILER = ["gcc", "-std=gnu17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra"]
WRITES, READS = 1, 2
NANOSECONDS = 1_000_000_000


class _Control(ctypes.Structure):
    """`struct control` of shim.c."""

    _fields_ = [
        ("offset", ctypes.c_int64),
        ("visits", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("classes", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("done", ctypes.c_int64),
        ("folder", ctypes.c_char * 4096),
    ]


class Shim:
    """The library and its control file in `folder`; `environment` loads it into a process and all that it starts.

    Raises SystemExit if it cannot be compiled.
    """

    def __init__(self, folder: Path) -> None:
        library, path = build(), folder / "shim.control"
        path.write_bytes(bytes(ctypes.sizeof(_Control)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._control = _Control.from_buffer(self._map)
        self.environment = {"LD_PRELOAD": str(library), "SOAK_SHIM": str(path)}

    def arm(self, folder: Path, classes: int, error: int, first: int, count: int | None) -> None:
        """Let `count` file operations (None: all) below `folder` fail with errno `error` from number `first` on;
        error 0 kills the process group at that operation.
        """
        control = self._control
        control.classes = 0
        control.visits = control.done = 0
        control.folder, control.error = str(folder).encode(), error
        control.first, control.last = first, 2**62 if count is None else first + count - 1
        control.classes = classes

    def disarm(self) -> tuple[int, int]:
        """Let nothing fail any more; returns how many operations were counted, and how many of them failed."""
        self._control.classes = 0
        return self._control.visits, self._control.done

    def shift_clock(self, seconds: float) -> None:
        """Let the wall clock of all processes differ from the real one by `seconds`."""
        self._control.offset = int(seconds * NANOSECONDS)

    def clock(self) -> float:
        """Seconds between the wall clock of the processes and the real one."""
        return self._control.offset / NANOSECONDS


def build() -> Path:
    """Compile the library unless it was compiled already; returns its path."""
    BUILT.mkdir(parents=True, exist_ok=True)
    library = BUILT / f"shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    with (BUILT / "shim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            try:
                subprocess.run([*COMPILER, str(SOURCE), "-o", str(unfinished)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise SystemExit(f"{SOURCE}: cannot be compiled ({error}); the soak needs gcc") from error
            unfinished.rename(library)
    return library
