"""One run of tools/bench_attention.py: what is checked, timed, refused and left out."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from megatron_coca.evaluation.speed.cases import EINSUM
from tools import bench_parity, bench_report
from tools.bench_cases import Case, Shape
from tools.bench_report import Record
from tools.bench_steps import DECODE, MODES, Workload, make_frame, steps_of
from tools.bench_timing import Clock, free_bytes, peak_mib
from tools.records import append_records

Verdict = tuple[bench_parity.Errors, str | None]
"""The errors, and the reason for refusal or None."""

SCORES = {"forward": 6, "forward+backward": 12, DECODE: 0}
"""N x N tensors alive at once, generously, in the backends that hold any."""
DENSE = ("reference", EINSUM)
SHARE_OF_FREE = 0.8


@dataclass
class Bench:
    """A run: what it may spend, and what it has found.

    Attributes:
        seconds: budget of one case at one length, by the time that the length before took.
        last: (length, seconds of a call) of a case and mode when it was last measured.
        environment: device and versions, for the records.
        verdicts: of a case and mode against the oracle.
    """

    shape: Shape
    cases: list[Case]
    clock: Clock
    rounds: int
    seconds: float
    output: Path
    environment: Record
    last: dict[tuple[Case, str], tuple[int, float]] = field(default_factory=dict)
    verdicts: dict[tuple[Case, str], Verdict] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def measure(self, length: int, mode: str) -> None:
        """All cases at one length in one mode: check, time in turns, memory, records."""
        new_tokens = 1 if mode == DECODE else None
        packed = self.shape.packed(length, new_tokens or 0)
        works: dict[Case, Workload] = {}
        verdicts: dict[Case, Verdict] = {}
        for (name, operands), cases in self._grouped(length, mode).items():
            work = Workload.build(name, operands, self.shape, packed, new_tokens)
            verdicts |= self._checked(work, cases, mode)
            works |= {case: work for case in cases if verdicts[case][1] is None}
        found = self._timed(works, mode, length)
        found |= {case: _refused(case, mode, length, verdicts[case]) for case in verdicts if case not in works}
        for case, record in found.items():
            about = bench_report.about(case, mode, self.shape, length)
            found[case] = about | record | {"parity": verdicts[case][0]} | self.environment
        append_records(self.output, found.values())
        self.records += found.values()

    def _grouped(self, length: int, mode: str) -> dict[tuple[str, str], list[Case]]:
        """The cases that are run, by what shares its operands."""
        groups: dict[tuple[str, str], list[Case]] = {}
        for case in self.cases:
            if mode == DECODE and (case.backend == EINSUM or case.operands != "torch"):
                continue  # neither has a way to decode with a cache
            reason = self._too_much(case, length, mode)
            if reason is None:
                groups.setdefault((case.method, case.operands), []).append(case)
            else:
                print(f"skipped {case} {mode} {length}: {reason}")
        return groups

    def _too_much(self, case: Case, length: int, mode: str) -> str | None:
        """Why the case is not run at this length, or None."""
        if case.backend in DENSE:
            each = 4 * self.shape.batch(length) * self.shape.heads * length**2
            needed, free = SCORES[mode] * each, SHARE_OF_FREE * free_bytes(self.shape.device)
            if needed > free:
                return f"its scores take about {needed / 2**30:.0f} GiB, free are {free / 2**30:.0f}"
        if (case, mode) not in self.last:
            return None
        before, took = self.last[case, mode]
        grown = (length / before) ** (1 if mode == DECODE else 2) * self.shape.batch(length) / self.shape.batch(before)
        expected = took * grown * (self.rounds + 1)
        return f"about {expected:.0f} s, allowed are {self.seconds:.0f}" if expected > self.seconds else None

    def _checked(self, work: Workload, cases: list[Case], mode: str) -> dict[Case, Verdict]:
        new = [case for case in cases if (case, mode) not in self.verdicts]
        if new:
            short, truth = bench_parity.by_oracle(new[0].method, new[0].operands, self.shape, mode)
            for case in new:
                self.verdicts[case, mode] = bench_parity.verdict(short, mode, steps_of(case), truth)
        rows = bench_parity.by_rows(work, mode)
        found = {}
        for case in cases:
            wrong = self.verdicts[case, mode][1] is not None
            found[case] = self.verdicts[case, mode] if wrong else bench_parity.verdict(work, mode, steps_of(case), rows)
        return found

    def _timed(self, works: dict[Case, Workload], mode: str, length: int) -> dict[Case, Record]:
        calls = {case: MODES[mode](work, steps_of(case), None) for case, work in works.items()}
        times = self.clock.rounds(calls, self.rounds)
        records = {}
        for case, work in works.items():
            self.last[case, mode] = length, median(times[case])
            record = bench_report.measured(case, mode, work, times, self.clock.ceiling)
            record |= {"frame_seconds": self._frame_seconds(work), "peak_mib": peak_mib(calls[case], self.shape.device)}
            print(f"{case} {mode} {length}: {record['seconds']:.3e} s, {record['peak_mib']:.0f} MiB", flush=True)
            records[case] = record
        return records

    def _frame_seconds(self, work: Workload) -> float:
        return median(
            self.clock.seconds(lambda: make_frame(work.encoding, work.packed, work.new_tokens)) for _ in range(3)
        )


def _refused(case: Case, mode: str, length: int, verdict: Verdict) -> Record:
    """A case that computes something else: no times."""
    print(f"REFUSED {case} {mode} {length}: {verdict[1]}")
    return {"status": "refused", "reason": verdict[1]}
