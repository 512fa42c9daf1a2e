"""One call of everything that is to be timed: whether it fits, how much memory it takes, and about how long."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
SHORT, STEP = 256, 4
"""Tokens of a call that nothing guards, and by how much the next length at most exceeds the last one called."""
WHOLE_SEQUENCES = "the contraction computes whole sequences only"
"""Why it has no cells of decoding."""


@dataclass(frozen=True)
class Plan:
    """What is measured of every method; `budget` in seconds is for all rounds of one method at one length."""

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


def _nothing() -> None:
    pass


@dataclass
class _Climb:
    """One kind of work of a method, at longer and longer lengths; `called` has length and seconds of each call."""

    built: Built
    what: What
    plan: Plan
    settle: Callable[[], object]
    called: list[tuple[int, float]] = field(default_factory=list)

    def at(self, length: int) -> Probe:
        """A call of `length` tokens, unless something stands against it."""
        calls = self.plan.rounds + 1 if length in self.plan.lengths else 1
        obstacle = _too_large(self.built, self.what, length, self.plan.batch) or self._too_slow(length, calls)
        return obstacle or self._tried(length)

    def _too_slow(self, length: int, calls: int) -> Probe | None:
        expected = calls * expected_seconds(self.called, length)
        if expected <= self.plan.budget:
            return None
        reason = f"would take about {_digits(expected)} s, --budget-seconds allows {self.plan.budget:.12g}"
        return Probe(self.what, length, kind="not run", reason=reason)

    def _tried(self, length: int) -> Probe:
        device = first_layer(self.built.model).dense.weight.device
        try:
            work = WORKLOADS[self.what](self.built.model, length, self.plan.batch)
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            self.settle()
            with measured(device) as meter:
                work.call()
        except ValueError as error:
            return Probe(self.what, length, kind="refused", reason=str(error))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            reason = f"the memory of {device} does not suffice ({_gib(free_bytes(device))} were free)"
            return Probe(self.what, length, kind="out of memory", reason=reason)
        self.called.append((length, meter.seconds))
        return Probe(self.what, length, None if meter.peak_memory_bytes is None else meter.peak_memory_bytes - held)


def probe(built: Built, plan: Plan, settle: Callable[[], object] = _nothing) -> Iterator[Probe]:
    """Every cell of a method, here. `settle` is called before each measurement."""
    for what in plan.whats:
        if what == "decode" and built.case.contracted:
            yield from (Probe(what, length, kind="refused", reason=WHOLE_SEQUENCES) for length in sorted(plan.lengths))
            continue
        climb = _Climb(built, what, plan, settle)
        for length in stepping_stones(plan.lengths):
            found = climb.at(length)
            if length in plan.lengths:
                yield found


def stepping_stones(lengths: Sequence[int]) -> list[int]:
    """The lengths to call, ascending: those asked for, and others before them so that time is known from two calls
    before it can matter, and is never foretold for more than `STEP` times the length.
    """
    first = min(SHORT, *lengths)
    stones = [each for each in (first // 2, first) if each > 0]
    for length in sorted(lengths):
        while stones[-1] * STEP < length:
            stones.append(stones[-1] * STEP)
        if length > stones[-1]:
            stones.append(length)
    return stones


def expected_seconds(called: Sequence[tuple[int, float]], length: int) -> float:
    """Of a call of `length` tokens after calls of (length, seconds): as between the last two, but neither less than
    linear nor more than quadratic, which it is taken for after one. 0 where nothing is known.
    """
    if not called:
        return 0.0
    last, seconds = called[-1]
    exponent = 2.0
    if len(called) > 1:
        before, faster = called[-2]
        exponent = math.log(seconds / faster) / math.log(last / before)
    return seconds * (length / last) ** min(2.0, max(1.0, exponent))


def _too_large(built: Built, what: What, length: int, batch: int) -> Probe | None:
    """Scores that are far beyond the memory are not even tried."""
    if built.backend not in DENSE:
        return None
    model, weight = built.case.config.model, first_layer(built.model).dense.weight
    working, kept = SCORES[what]
    tensors = (working + kept * model.num_layers) * batch * model.num_attention_heads
    needed, free = tensors * length**2 * weight.element_size(), SHARE_OF_FREE * free_bytes(weight.device)
    if needed <= free:
        return None
    reason = f"its {length} x {length} scores take about {_gib(needed)}, free are {_gib(free)}"
    return Probe(what, length, kind="out of memory", reason=reason)


def _digits(seconds: float) -> str:
    """Two that count, without an exponent."""
    return f"{float(f'{seconds:.2g}'):.12g}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
