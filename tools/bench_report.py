"""Records and tables of tools/bench_attention.py."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_coca.attention.layer import bytes_per_token
from megatron_coca.evaluation.speed.cases import CONTRACTION, EINSUM
from tools.bench_cases import Case, Shape
from tools.bench_steps import DECODE, Workload
from tools.bench_timing import operations

LIBRARY = ("sdpa", "flash", "flex")
"""Backends that are a library's attention; the fastest of them on RoPE is what all others are held against."""

Record = dict[str, Any]
Times = Mapping[Case, Sequence[float]]


def about(case: Case, mode: str, shape: Shape, length: int) -> Record:
    """What a record is of."""
    fields = {name: value for name, value in asdict(shape).items() if name not in ("device", "tokens")}
    what = {"benchmark": "attention", **asdict(case), "mode": mode}
    return what | fields | {"length": length, "batch": shape.batch(length)}


def measured(case: Case, mode: str, work: Workload, times: Times, ceiling: float) -> Record:
    """Time, ratios and operations; `ceiling` in operations per second."""
    seconds = statistics.median(times[case])
    speed = operations(work, mode) / seconds
    return {
        "status": "measured",
        "seconds": seconds,
        "rounds": len(times[case]),
        **_ratios("rope", times[case], times, _fastest_rope(times)),
        **_ratios(CONTRACTION, times[case], times, Case(CONTRACTION, EINSUM)),
        "tflops": speed / 1e12,
        "ceiling_tflops": ceiling / 1e12,
        "share_of_ceiling": speed / ceiling,
        "packed_mib": work.packed.nbytes / 2**20,
        **(_cache(work) if mode == DECODE else {}),
    }


def _fastest_rope(times: Times) -> Case | None:
    ropes = [case for case in times if case.method == "rotary" and case.backend in LIBRARY]
    return min(ropes, key=lambda case: statistics.median(times[case]), default=None)


def _ratios(name: str, own: Sequence[float], times: Times, base: Case | None) -> Record:
    """Round by round, so that a machine that slows down for a while slows both."""
    if base not in times:
        return {f"ratio_to_{name}": None}
    ratios = [mine / other for mine, other in zip(own, times[base], strict=True)]
    return {
        f"ratio_to_{name}": statistics.median(ratios),
        f"ratio_to_{name}_quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else None,
        f"{name}_case": str(base),
    }


def _cache(work: Workload) -> Record:
    """Bytes that one layer keeps of a token, and RoPE's."""
    kept = bytes_per_token(work.method, work.shape.kv_heads, 1, getattr(torch, work.shape.dtype))
    ropes = 2 * work.shape.head_dim * work.shape.kv_heads * getattr(torch, work.shape.dtype).itemsize
    return {"cache_bytes_per_token": kept, "cache_ratio_to_rope": kept / ropes}


COLUMNS: dict[str, tuple[str, str]] = {
    "ratio to RoPE": ("ratio_to_rope", "{:.3f}"),
    "ratio to the contraction": (f"ratio_to_{CONTRACTION}", "{:.3f}"),
    "seconds": ("seconds", "{:.2e}"),
    "share of the ceiling": ("share_of_ceiling", "{:.3f}"),
    "MiB": ("peak_mib", "{:.0f}"),
}
WIDTH = 36


def tables(records: Sequence[Record]) -> str:
    """For each mode a table per quantity, a row per case, a column per length; and how memory grows."""
    modes = dict.fromkeys(record["mode"] for record in records)
    found = []
    for mode in modes:
        own = [record for record in records if record["mode"] == mode]
        columns = {title: column for title, column in COLUMNS.items() if any(each.get(column[0]) for each in own)}
        found += [_table(f"{mode}: {title}", own, *column) for title, column in columns.items()]
    return "\n\n".join([*found, _growth(records)])


def _table(title: str, records: Sequence[Record], key: str, form: str) -> str:
    lengths = sorted({record["length"] for record in records})
    lines = [f"{title:{WIDTH}}" + "".join(f"{length:>10}" for length in lengths)]
    for name, row in _by_case(records).items():
        cells = (_cell(row[length], key, form) if length in row else "skipped" for length in lengths)
        lines.append(f"{name:{WIDTH}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _by_case(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    rows: dict[str, dict[int, Record]] = {}
    for record in records:
        name = str(Case(record["method"], record["backend"], record["operands"]))
        rows.setdefault(name, {})[record["length"]] = record
    return rows


def _cell(record: Record, key: str, form: str) -> str:
    if record["status"] == "refused":
        return "refused"
    return "-" if record.get(key) is None else form.format(record[key])


def _growth(records: Sequence[Record]) -> str:
    """The exponent p of memory ~ length^p between the shortest and the longest length of a forward and backward pass."""
    lines = ["memory of forward+backward grows as length^p"]
    kept = [each for each in records if each["mode"] == "forward+backward" and each.get("peak_mib", 0) > 0]
    for name, row in _by_case(kept).items():
        low, high = min(row), max(row)
        if low < high:
            grown = math.log(_memory(row[high]) / _memory(row[low])) / math.log(high / low)
            lines.append(f"{name:{WIDTH}}{grown:>10.2f}")
    return "\n".join(lines)


def _memory(record: Record) -> float:
    """Of one row of the batch."""
    return record["peak_mib"] / record["batch"]
