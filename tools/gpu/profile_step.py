"""Profile compiled training steps: the share of time in which the GPU is idle, and the time of each kernel.

    python tools/gpu/profile_step.py CONFIG.yml [MORE.yml] [key=value ...] --output FILE.jsonl

The first line of results has the milliseconds, the idle share and the number of kernels of a step. A line for each of
the slowest kernels follows. `--without-values` accepts a device that reports no kernels (tests/pretend).
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import load_config, split_inputs
from megatron_coca.training import launch
from megatron_coca.training.engine import group
from tools.bench_train import draw, own_step
from tools.gpu.cases import run_cases, write_line

WARMUP, STEPS = 8, 5
SLOWEST = 30
"""Number of kernels that get a line."""


class Ran(NamedTuple):
    """A kernel or copy that ran on the device: its name, and when it began and ended, in microseconds."""

    name: str
    start: float
    stop: float


def busy(kernels: Iterable[Ran]) -> float:
    """Return the microseconds in which at least one kernel runs."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda each: each.start):
        total += max(0.0, kernel.stop - max(kernel.start, reached))
        reached = max(reached, kernel.stop)
    return total


def summary(kernels: Sequence[Ran], steps: int) -> dict[str, Any]:
    """Return figures per step, from the start of the first kernel to the end of the last one."""
    span = max(kernel.stop for kernel in kernels) - min(kernel.start for kernel in kernels)
    return {
        "milliseconds": round(span / steps / 1e3, 4),
        "idle_share": round(1 - busy(kernels) / span, 4),
        "kernels": round(len(kernels) / steps, 1),
    }


def slowest(kernels: Sequence[Ran], steps: int) -> list[dict[str, Any]]:
    """Return a line for each of the kernels with the greatest total time."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.stop - kernel.start)
    whole = sum(map(sum, times.values()))
    lines: list[dict[str, Any]] = [
        {
            "case": name[:120],
            "status": "ok",
            "milliseconds": round(sum(each) / steps / 1e3, 4),
            "share": round(sum(each) / whole, 4),
            "launches": round(len(each) / steps, 1),
        }
        for name, each in times.items()
    ]
    return sorted(lines, key=lambda line: -line["milliseconds"])[:SLOWEST]


def recorded(call: Any) -> list[Ran]:
    """Return the kernels and copies that ran on the device during a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [
        Ran(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == device and not getattr(event, "is_user_annotation", False)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile the steps; return 1 if no kernel was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="CONFIG.yml | key=value")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file of results")
    parser.add_argument("--without-values", action="store_true", help="accept a device that reports no kernels")
    options = parser.parse_intermixed_args(arguments)
    files, keys = split_inputs(options.inputs)
    kernels: list[Ran] = []

    def step() -> dict[str, Any]:
        config = load_config(files, [*keys, "torch_compile=true"])
        call, backend = own_step(config)
        batches = draw(config, torch.Generator().manual_seed(0))
        for _ in range(WARMUP):
            call(batches)
        kernels.extend(recorded(lambda: [call(batches) for _ in range(STEPS)]))
        if not kernels and not options.without_values:
            raise RuntimeError("the profiler saw no kernel; CUPTI may be missing or not permitted")
        return {"backend": backend} | (summary(kernels, STEPS) if kernels else {"kernels": 0})

    launch.complete_environment(os.environ)
    group.init_distributed()
    try:
        status = run_cases({"step": step}, options.output)
        for line in slowest(kernels, STEPS):
            write_line(options.output, **line)
    finally:
        group.shut_down()
    return status


if __name__ == "__main__":
    sys.exit(main())
