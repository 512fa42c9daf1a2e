"""Clocks, memory, and what they are held against: for tools/bench_attention.py."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from megatron_coca.attention.inputs import Band
from megatron_coca.model.build import M_MMAP_THRESHOLD, keep_freed_memory
from tools.bench_steps import Workload

Key = TypeVar("Key")
SMALLEST_BLOCK = 64 << 10
"""Bytes from which on a freed block is given back while memory is measured."""
SQUARE = {"cpu": 2048, "cuda": 8192}
"""Side of the matrices whose product is the device's ceiling."""
FORWARD, FORWARD_BACKWARD = 4, 4 * 3.5
"""Floating-point operations for a visible pair and a feature: two products of two forward, five more backward."""


class Clock:
    """Seconds of a call: of the host on the CPU, of the device on CUDA.

    On CUDA the call is queued behind products of large matrices, so that what the host takes to launch kernels does
    not count as long as it stays below theirs.
    """

    def __init__(self, device: str, dtype: str) -> None:
        self.cuda = device == "cuda"
        side = SQUARE[device]
        self._matrices = [torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(3)]
        self._multiply()
        self.ceiling = 2 * side**3 / statistics.median(self.seconds(self._multiply) for _ in range(10))

    def _multiply(self) -> None:
        left, right, out = self._matrices
        torch.mm(left, right, out=out)

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call."""
        if not self.cuda:
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            self._multiply()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def rounds(self, calls: Mapping[Key, Callable[[], object]], count: int) -> dict[Key, list[float]]:
        """Seconds of `count` calls of each, in turns, after one turn that does not count."""
        times: dict[Key, list[float]] = {key: [] for key in calls}
        for turn in range(count + 1):
            for key, call in calls.items():
                seconds = self.seconds(call)
                if turn > 0:
                    times[key].append(seconds)
        return times


def visible_pairs(bands: tuple[Band, ...], queries: int, keys: int) -> int:
    """Pairs of a query, which are the last of the keys, and a key that some band holds; for one row of a batch."""
    token = torch.arange(keys - queries, keys)
    return sum(int(_keys_seen(band, token).sum()) for band in bands)


def _keys_seen(band: Band, token: torch.Tensor) -> torch.Tensor:
    """How many distances each query has in the band: from its low end, to its high one and the first key."""
    high = token + 1 if band.high is None else (token + 1).clamp(max=band.high)
    low = torch.full_like(token, band.low)
    low = low if band.first_keys is None else low.clamp(min=token - band.first_keys + 1)
    return (high - low).clamp(min=0)


def operations(work: Workload, mode: str) -> float:
    """Floating-point operations of the products of attention over the visible pairs."""
    batch, keys, _ = work.packed.shape
    bands = tuple(segment.band for segment in work.frame.segments)
    pairs = visible_pairs(bands, work.new_tokens or keys, keys)
    each = FORWARD_BACKWARD if mode == "forward+backward" else FORWARD
    return each * pairs * work.shape.head_dim * work.shape.heads * batch


def peak_mib(call: Callable[[], object], device: str) -> float:
    """Memory of one call above what is held before it.

    On the CPU that is the peak resident size, which Linux lets a process reset. So that it is the memory in use, the C
    library is told to give back every block that is freed; afterwards it keeps them again, as in training.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, SMALLEST_BLOCK)
    call()  # libraries keep buffers of their own
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before_mib = _resident_mib("VmRSS")
    call()
    peak = _resident_mib("VmHWM") - before_mib
    keep_freed_memory()
    return peak


def free_bytes(device: str) -> int:
    """What may still be allocated."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def _resident_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
