"""Benchmark results as data: one JSON object per line, with what they depend on."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron_coca.checkpoints.native import code_versions


def environment(root: Path) -> dict[str, Any]:
    """Device, threads, versions and commit of the measuring process."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": code_versions(),
    }


def append_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Add one line per record; the folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
