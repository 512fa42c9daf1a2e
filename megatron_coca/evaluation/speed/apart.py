"""Probing a method on the CPU in a process of its own, which may not take more than the memory that is free.

What does not fit ends as an error there, and neither the machine nor the measurement suffers; and the peak of a
process's resident memory, which is all that the system counts, is that of the method.
"""

import ctypes
import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megatron_coca.config import load_config
from megatron_coca.evaluation.options import DTYPES
from megatron_coca.evaluation.speed.cases import Built, Case, build
from megatron_coca.evaluation.speed.probing import SHARE_OF_FREE, Plan, Probe, free_bytes, probe
from megatron_coca.evaluation.speed.workloads import WORKLOADS
from megatron_coca.model.allocator import M_MMAP_THRESHOLD

SMALLEST_BLOCK = 64 << 10
"""Bytes from which on a freed block is given back at once, so that resident memory is memory in use."""
MODULE = "megatron_coca.evaluation.speed.apart"
ROOT = Path(__file__).parents[3]
KILLED = -9


def probe_apart(case: Case, plan: Plan, dtype: str) -> list[Probe]:
    """Every cell of a method."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "config.yml"
        config.write_text(case.config.to_yaml())
        asked = {"label": case.label, "config": str(config), "contracted": case.contracted, "dtype": dtype}
        asked |= {"plan": asdict(plan), "threads": torch.get_num_threads()}
        command = [sys.executable, "-m", MODULE]
        answer = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT)
    found = [Probe(**json.loads(line)) for line in answer.stdout.splitlines() if line.startswith("{")]
    return found if answer.returncode == 0 else [*found, *lost(plan, found, answer.returncode, answer.stderr)]


def lost(plan: Plan, found: Sequence[Probe], status: int, errors: str) -> Iterator[Probe]:
    """What a process that ended early, with exit status `status`, did not come to."""
    known = {(each.what, each.length) for each in found}
    last = (errors.strip().splitlines() or ["no message"])[-1]
    for what, length in ((what, length) for what in plan.whats for length in sorted(plan.lengths)):
        if (what, length) in known:
            continue
        if status == KILLED:
            yield Probe(what, length, kind="out of memory", reason="the system ended its process, as it does then")
        else:
            yield Probe(what, length, kind="failed", reason=f"its process ended with {status}: {last}")


def main() -> None:
    """Reads what is asked from the standard input, and writes a line of JSON for each cell."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    given = asked["plan"]
    plan = Plan(tuple(given["whats"]), tuple(given["lengths"]), given["batch"], given["rounds"], given["budget"])
    case = Case(asked["label"], load_config([asked["config"]]), asked["contracted"])
    built = build(case, "cpu", DTYPES[asked["dtype"]])
    _warm(built)
    _limit_memory()
    for found in probe(built, plan, _give_back):
        print(json.dumps(asdict(found)), flush=True)


def _warm(built: Built) -> None:
    """Libraries make buffers of their own at the first call."""
    WORKLOADS["model forward+backward"](built.model, 8, 1).call()


def _give_back() -> None:
    """Return what is free to the system: blocks that are used again would not make resident memory grow."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _limit_memory() -> None:
    """Let allocations beyond the free memory fail, instead of letting the system end some process."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALLEST_BLOCK)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) * 1024
    limit = held + int(SHARE_OF_FREE * free_bytes(torch.device("cpu")))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
