"""The host: the name of its processor, preloaded libraries, and a setting of glibc that keeps freed memory."""

import ctypes
import os
import platform
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
LARGEST_THRESHOLD = 32 << 20
"""The largest M_MMAP_THRESHOLD that glibc accepts on 64-bit machines."""


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step; return False if the C library has no such setting.

    Memory that is returned to the kernel and allocated again causes a page fault per page. This takes 10 to 20% of a
    training step of small models (docs/speed.md). Peak memory does not change.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = {M_MMAP_THRESHOLD: LARGEST_THRESHOLD, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
    accepted = [library.mallopt(name, value) for name, value in settings.items()]
    return all(accepted)


def processor_name() -> str:
    """Return the model name of the processor, or its architecture if the system does not report a name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def preloaded_libraries() -> list[str]:
    """Return the file names of the libraries in LD_PRELOAD. Such a library can change the kernels of MKL."""
    return [Path(name).name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
