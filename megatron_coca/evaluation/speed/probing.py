"""One call of everything that is to be timed: whether it fits, how much memory it takes, and about how long."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_coca.evaluation.measure import measured, out_of_memory
from megatron_coca.evaluation.speed.cases import DENSE, Built
from megatron_coca.evaluation.speed.records import What
from megatron_coca.evaluation.speed.workloads import WORKLOADS, first_layer

SHARE_OF_FREE = 0.8
SCORES: dict[What, tuple[int, int]] = {
    "layer forward": (5, 0),
    "layer forward+backward": (8, 0),
    "model forward": (5, 0),
    "model forward+backward": (6, 2),
    "decode": (0, 0),
}
"""N x N tensors that a dense backend holds at once at most: while one layer is computed, and for each layer until the
backward pass. Only what is far beyond the memory is left out by this estimate."""


@dataclass(frozen=True)
class Plan:
    """What is measured of every method; `budget` in seconds is for one method at one length."""

    whats: tuple[What, ...]
    lengths: tuple[int, ...]
    batch: int
    rounds: int
    budget: float


@dataclass(frozen=True)
class Probe:
    """One of a method's cells: memory of a call, or why it is not measured."""

    what: What
    length: int
    peak: int | None = None
    kind: Literal["refused", "out of memory", "not run", "failed"] | None = None
    reason: str = ""


def free_bytes(device: torch.device) -> int:
    """What may still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024


def probe(built: Built, plan: Plan) -> Iterator[Probe]:
    """Every cell of a method, here; the contraction, which computes whole sequences, has none of decoding."""
    device = first_layer(built.model).dense.weight.device
    for what in (what for what in plan.whats if not (what == "decode" and built.case.contracted)):
        before: tuple[int, float] | None = None
        for length in sorted(plan.lengths):
            obstacle = _obstacle(built, what, length, plan, before, device)
            if obstacle is not None:
                yield obstacle
                continue
            found, seconds = _tried(built, what, length, plan.batch, device)
            before = (length, seconds) if found.kind is None else before
            yield found


def _obstacle(
    built: Built, what: What, length: int, plan: Plan, before: tuple[int, float] | None, device: torch.device
) -> Probe | None:
    """Why a cell is not even tried."""
    if built.backend in DENSE:
        model = built.case.config.model
        working, kept = SCORES[what]
        itemsize = first_layer(built.model).dense.weight.element_size()
        needed = (working + kept * model.num_layers) * plan.batch * model.num_attention_heads * length**2 * itemsize
        free = SHARE_OF_FREE * free_bytes(device)
        if needed > free:
            reason = f"its {length} x {length} scores take about {_gib(needed)}, free are {_gib(free)}"
            return Probe(what, length, kind="out of memory", reason=reason)
    if before is None:
        return None
    expected = before[1] * (length / before[0]) ** 2 * (plan.rounds + 1)
    if expected > plan.budget:
        reason = f"would take up to {expected:.0f} s, --budget-seconds allows {plan.budget:.0f}"
        return Probe(what, length, kind="not run", reason=reason)
    return None


def _tried(built: Built, what: What, length: int, batch: int, device: torch.device) -> tuple[Probe, float]:
    try:
        work = WORKLOADS[what](built.model, length, batch)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with measured(device) as meter:
            work.call()
    except ValueError as error:
        return Probe(what, length, kind="refused", reason=str(error)), 0.0
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        reason = f"the memory of {device} does not suffice ({_gib(free_bytes(device))} were free)"
        return Probe(what, length, kind="out of memory", reason=reason), 0.0
    peak = None if meter.peak_memory_bytes is None else meter.peak_memory_bytes - held
    return Probe(what, length, peak), meter.seconds


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
