"""The stand-in device from Python: its counters, its waits with their Python stacks, and its log in order.

It works only in a process that was started with the library loaded (`environment`).
"""

import ctypes
import os
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.pretend.build import LIBRARY, ROOT

FOLDER = "PRETEND_FOLDER"
"""Variable with the folder of the loaded library."""
STACK_DEPTH = 8
"""Frames of a wait that are shown."""


def environment(folder: Path, capability: int) -> dict[str, str]:
    """Return the variables of a process that runs on the stand-in device whose library is in `folder`.

    `capability` is the compute capability of the device that is imitated: 80 is an A100, 90 an H100, 100 a B200.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "LD_PRELOAD": str(folder / LIBRARY),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PRETEND_CAP": str(capability),
        "OMP_NUM_THREADS": "1",
        FOLDER: str(folder),
    }


class Event(NamedTuple):
    """An entry of the log; `amount` is in bytes for copies and collectives."""

    kind: str
    name: str
    stream: int
    amount: int


@dataclass
class Record:
    """What happened while `recording`.

    Attributes:
        counts: occurrences by kind and name; the kinds are in native/record.h.
        stacks: occurrences by kind, name and Python stack, innermost frame first, of waits.
        late: waits for events, by the number of launches that were issued since the event was recorded.
        events: what happened, in order, if it was logged.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    stacks: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    late: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def total(self, kind: str, *names: str) -> int:
        """Count of a kind, or of the named ones of it."""
        return sum(n for (of, name), n in self.counts.items() if of == kind and (not names or name in names))

    def names(self, kind: str) -> dict[str, int]:
        """Counts of a kind by name, most frequent first; names of C++ functions are readable."""
        found = {name: n for (of, name), n in self.counts.items() if of == kind}
        merged: Counter[str] = Counter()
        for name, n in zip(readable(list(found)), found.values(), strict=True):
            merged[name] += n
        return dict(merged.most_common())

    def text(self, kernels: int = 20) -> str:
        """Return counts, waits with their stacks, and the kernels that were launched most, in lines."""
        lines = [f"launches {self.total('launch')}, into CUDA graphs {self.total('captured')}"]
        for kind in ("wait", "pageable", "copy", "collective", "allocation", "order", "refused", "other"):
            lines += [f"{kind}: {count} {name}" for name, count in self.names(kind).items()]
        lines += [f"{count} {kind} {name}: {stack}" for (kind, name, stack), count in self.stacks.most_common()]
        lines += [f"{count:6d} {name[:200]}" for name, count in list(self.names("launch").items())[:kernels]]
        return "\n".join(lines)


class _Entry(ctypes.Structure):
    _fields_ = [("counter", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("amount", ctypes.c_uint64)]


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64)


def _library() -> ctypes.CDLL:
    folder = os.environ.get(FOLDER)
    if folder is None:
        raise RuntimeError("this process has no stand-in device; start it by `python -m tests.pretend`")
    return _declare(ctypes.CDLL(str(Path(folder, LIBRARY))))  # loaded already: returns that one


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.pretend_next_counter.restype = ctypes.c_size_t
    library.pretend_next_counter.argtypes = [ctypes.c_size_t]
    library.pretend_counter.restype = ctypes.c_long
    library.pretend_counter.argtypes = [ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    library.pretend_events.restype = ctypes.POINTER(_Entry)
    library.pretend_reset.argtypes = [ctypes.c_bool]
    return library


@contextmanager
def recording(log: bool = False) -> Iterator[Record]:
    """Count from zero while the context lasts, and fill the record when it ends; not nested."""
    library, record = _library(), Record()

    def waited(kind: bytes, name: bytes, amount: int) -> None:
        record.stacks[kind.decode(), name.decode(), _stack()] += 1
        if name == b"cudaEventSynchronize":
            record.late.append(amount)

    callback = _CALLBACK(waited)
    library.pretend_reset(log)
    library.pretend_report_waits(callback)
    try:
        yield record
    finally:
        library.pretend_report_waits(None)
        record.counts.update(dict(_counters(library)))
        if log:
            record.events = list(_events(library))


def _counters(library: ctypes.CDLL) -> Iterator[tuple[tuple[str, str], int]]:
    slot = library.pretend_next_counter(0)
    while count := (entry := _counter(library, slot))[1]:
        yield entry[0], count
        slot = library.pretend_next_counter(slot + 1)


def _counter(library: ctypes.CDLL, slot: int) -> tuple[tuple[str, str], int]:
    kind, name = ctypes.c_char_p(), ctypes.c_char_p()
    count = library.pretend_counter(slot, ctypes.byref(kind), ctypes.byref(name))
    return ((kind.value or b"").decode(), (name.value or b"").decode()), count


def _events(library: ctypes.CDLL) -> Iterator[Event]:
    count = ctypes.c_size_t()
    entries = library.pretend_events(ctypes.byref(count))
    known: dict[int, tuple[str, str]] = {}
    for index in range(count.value):
        entry = entries[index]
        if entry.counter not in known:
            known[entry.counter] = _counter(library, entry.counter)[0]
        yield Event(*known[entry.counter], entry.stream, entry.amount)


def _stack() -> str:
    """The innermost frames of this thread that are not of this file, as `file:line function < caller`."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    places = [f"{_short(frame.filename)}:{frame.lineno} {frame.name}" for frame in frames[-STACK_DEPTH:]]
    return " < ".join(reversed(places)) or "a thread without Python frames"


def _short(path: str) -> str:
    return path.split("site-packages/")[-1].removeprefix(f"{ROOT}/")


def readable(names: list[str]) -> list[str]:
    """Return names of C++ functions as they are written, without their parameters' types."""
    if not names:
        return []
    try:
        done = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return names
    return done.stdout.rstrip("\n").split("\n")
