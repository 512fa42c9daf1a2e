"""Shared parts of the benchmarks: command line, child processes, and result files of one JSON object per line."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megatron_coca.attention.backends.sdpa import cudnn_version
from megatron_coca.checkpoints.native import code_versions
from megatron_coca.evaluation.results import out_of_memory
from megatron_coca.evaluation.tasks.speed.measure import quartiles


def benchmark_parser(description: str | None, output: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with --output and --rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="counted measurements (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks", output), help="default: %(default)s")
    return parser


class ChildProcess:
    """A function that is built and called in a separate process.

    `build(*arguments)` runs in the child and returns a function. Calling this object calls that function in the child.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        context = get_context("spawn")
        self._connection, child = context.Pipe()
        process = context.Process(target=_serve, args=(child, torch.get_num_threads(), build, arguments), daemon=True)
        process.start()
        child.close()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function, and raise the error that it raises: MemoryError if memory ran out, else RuntimeError."""
        self._connection.send(arguments)
        kind, value = self._connection.recv()
        if kind is not None:
            raise kind(value)
        return value


def _serve(
    connection: Connection, threads: int, build: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    call = build(*arguments)
    while True:
        try:
            received = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[type[Exception] | None, Any] = (None, call(*received))
        except Exception as error:
            answer = (MemoryError if out_of_memory(error) else RuntimeError, f"{type(error).__name__}: {error}")
        connection.send(answer)


def compared(own: list[float], base: list[float]) -> dict[str, Any]:
    """Return the median and the quartiles, over the rounds, of the ratio of `own` to `base`."""
    low, middle, high = quartiles([mine / theirs for mine, theirs in zip(own, base, strict=True)])
    return {"ratio": middle, "ratio_quartiles": [low, middle, high], "rounds": len(own)}


GPU_FIELDS = ("name", "uuid", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def machine() -> dict[str, Any]:
    """Return the facts that measurements depend on: GPU, driver, clocks, power limit, library versions, commit."""
    described: dict[str, Any] = {"versions": code_versions()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        described["versions"]["transformers"] = importlib.metadata.version("transformers")
    if torch.cuda.is_available():
        described["versions"]["cudnn"] = cudnn_version()
        described["versions"] |= {"triton": importlib.metadata.version("triton"), "cuda": torch.version.cuda}
        described["gpu"] = torch.cuda.get_device_name()
        command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # nvidia-smi is missing, fails, or hangs
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            lines = done.stdout.splitlines()
            described["nvidia-smi"] = [dict(zip(GPU_FIELDS, line.split(", "), strict=False)) for line in lines]
    return described


def append_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one JSON line per record, with this process's device, threads and versions. Creates a missing folder."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    environment = {
        "device": gpu or f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    } | machine()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:  # if this is a generator, it may measure each record only now
            file.write(json.dumps(record | environment) + "\n")
            file.flush()
