"""All methods at all lengths: probed first, then timed side by side, a length at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from megatron_coca.attention.cache import bytes_per_token
from megatron_coca.evaluation.results import Missing
from megatron_coca.evaluation.speed.cases import Built
from megatron_coca.evaluation.speed.contraction import EINSUM
from megatron_coca.evaluation.speed.probing import Plan, Probe
from megatron_coca.evaluation.speed.records import Ratio, SpeedCell, SpeedResult, What
from megatron_coca.evaluation.speed.rounds import interleaved, quartiles, ratio
from megatron_coca.evaluation.speed.workloads import WORKLOADS, Workload, first_layer
from megatron_coca.evaluation.store import Store

Probes = dict[str, list[Probe]]
"""By method."""
Times = dict[str, list[float]]
"""Seconds of single rounds by method."""


@dataclass(frozen=True)
class Bench:
    """Everything that one run measures."""

    built: Sequence[Built]
    plan: Plan
    device: torch.device

    def run(self, store: Store[SpeedResult], probe_one: Callable[[Built], Sequence[Probe]]) -> None:
        """Measures what `store` does not have; `probe_one` gives a method's probes."""
        probes = {each.label: list(probe_one(each)) for each in tqdm(self.built, desc="probed", unit="method")}
        for label, found in probes.items():
            for probe in found:
                if probe.kind is not None:
                    at = f"{probe.what}, length {probe.length}, {label}"
                    store.miss(Missing(at=at, kind=probe.kind, reason=probe.reason))
        for what in self.plan.whats:
            for length in tqdm(sorted(self.plan.lengths), desc=what, unit="length"):
                self._measure(store, probes, what, length)

    def _measure(self, store: Store[SpeedResult], probes: Probes, what: What, length: int) -> None:
        """One kind of work at one length: all methods that fit take turns."""
        peaks = {
            label: probe.peak
            for label, found in probes.items()
            for probe in found
            if (probe.what, probe.length) == (what, length) and probe.kind is None
        }
        taking = {each.label: each for each in self.built if each.label in peaks}
        works = {label: WORKLOADS[what](each.model, length, self.plan.batch) for label, each in taking.items()}
        times = interleaved({label: work.call for label, work in works.items()}, self.plan.rounds, self.device)
        for label, each in taking.items():
            store.put(self._cell(each, works[label], times, what, length, peaks[label]))

    def _cell(self, built: Built, work: Workload, times: Times, what: What, length: int, peak: int | None) -> SpeedCell:
        low, middle, high = (value / work.passes for value in quartiles(times[built.label]))
        return SpeedCell(
            what=what,
            length=length,
            method=built.label,
            backend=built.backend,
            seconds=middle,
            quartiles=(low, high),
            rounds=self.plan.rounds,
            tokens_per_second=work.tokens / middle,
            to_rope=self._ratio(built, times, self._rope_for(built, times)),
            to_contraction=self._ratio(built, times, self._contraction(times)),
            peak_memory_bytes=peak,
            cache_bytes_per_token=_cached(built) if what == "decode" else None,
        )

    def _rope_for(self, built: Built, times: Times) -> str | None:
        """Plain RoPE by the same backend; the contraction has a backend of its own, and is held against the first."""
        ropes = [each for each in self.built if each.case.is_plain_rope and each.label in times]
        same = [each for each in ropes if built.backend in (each.backend, EINSUM)]
        return next((each.label for each in same), None)

    def _contraction(self, times: Times) -> str | None:
        return next((each.label for each in self.built if each.backend == EINSUM and each.label in times), None)

    def _ratio(self, built: Built, times: Times, against: str | None) -> Ratio | None:
        return None if against is None else ratio(times[built.label], times[against], against)


def _cached(built: Built) -> int:
    model = built.case.config.model
    dtype = first_layer(built.model).dense.weight.dtype
    return bytes_per_token(built.model.method, model.num_kv_heads, model.num_layers, dtype)
