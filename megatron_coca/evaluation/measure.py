"""What a piece of work costs: time, and the most memory it held."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CPU_REFUSAL = "can't allocate memory"
"""What PyTorch's allocator on the CPU says; it has no class of its own for it."""


class Meter:
    """`seconds` and `peak_memory_bytes` of what `measured` enclosed; valid after it."""

    seconds: float = 0.0
    peak_memory_bytes: int | None = None


@contextmanager
def measured(device: torch.device) -> Iterator[Meter]:
    """Measures the enclosed work on `device`.

    The memory is the most that PyTorch held on a CUDA device, and on the CPU by how much the resident memory of the
    process grew at most; None where the system does not tell.
    """
    meter, before = Meter(), _reset_peak(device)
    began = time.perf_counter()
    try:
        yield meter
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        meter.seconds = time.perf_counter() - began
        meter.peak_memory_bytes = _peak(device, before)


def resident_memory() -> int | None:
    """Bytes of this process that are in memory now; None where the system does not tell."""
    return _status("VmRSS")


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that a device's memory did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_REFUSAL in str(error)


def _reset_peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return 0
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident_memory()


def _peak(device: torch.device, before: int | None) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _status(field: str) -> int | None:
    """A field of this process's status, in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line for line in lines if line.startswith(field + ":")]
    return int(found[0].split()[1]) * 1024 if found else None
