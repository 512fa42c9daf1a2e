"""Time block sizes of the attention kernels beside the present ones, and record those that are faster.

    python tools/gpu/sweep.py --output results/gpu/attention.blocks.jsonl     # about a minute on a GPU
    python tools/gpu/sweep.py --record results/gpu/attention.blocks.jsonl     # needs no GPU

The first command compiles the candidates in several processes at a time, and then times one after the other. If it is
killed, the same command continues after the last finished case. The second command writes the winners to
megatron_coca/kernels/measured_blocks.json, from which the kernels take their block sizes (`with_measured` in
launch_constants.py). A winner is faster than the present launch by `GAIN` in three of four rounds, at every length.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_coca.evaluation.tasks.speed.measure import interleaved
from megatron_coca.kernels import attention, attention_backward
from megatron_coca.kernels.launch_constants import (
    MEASURED,
    AttentionCall,
    Launch,
    Launches,
    Operands,
    architecture,
    blocks_for,
    row_class,
)
from tools.gpu.cases import MOST, read_lines, run_cases
from tools.records import compared, machine

CANDIDATES: dict[str, tuple[Launch, ...]] = {
    "key_gradients": tuple(
        Launch(rows, keys, warps, stages)
        for rows, keys, warps, stages in (
            *((32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 3), (32, 128, 8, 2)),
            *((64, 128, 8, 1), (64, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 1)),
        )
    ),
    "query_gradients": tuple(
        Launch(rows, keys, warps, stages)
        for rows, keys, warps, stages in (
            *((128, 32, 8, 2), (128, 32, 8, 3), (128, 32, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
            *((64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1)),
        )
    ),
}
"""Launches of each kernel that are timed beside the present one. A launch that needs too much shared memory fails; one
that spills registers is slow.
"""
BATCH_TOKENS = 16384
HEADS = 16
ERROR = 0.02
"""Largest allowed relative difference of gradients from those of the present launch, in half precision."""
GAIN = 0.03
"""Share of its time that a launch must save to replace the present one."""


class Problem:
    """Operands and saved results of one attention call, from which its gradients can be computed with any launch."""

    def __init__(self, segments: int, length: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator(device).manual_seed(length)
        shape = (max(1, BATCH_TOKENS // length) if device != "cpu" else 1, HEADS if device != "cpu" else 2, length)

        def draw() -> Tensor:
            return torch.randn((*shape, head_dim), generator=generator, device=device, dtype=dtype)

        q, k, v = draw(), draw(), draw()
        far_query, far_key = (draw(), draw()) if segments == 2 else (None, None)
        self.operands = Operands(q, k, far_query, far_key, v, None, None)
        self.present = blocks_for(q, segments)
        self.window = max(1, length // 8) if segments == 2 else None
        self.out, self.lse = attention.forward(self.operands, self.plan(self.present))
        self.grad = draw()
        self.saved = self.grad, self.lse, attention_backward._output_products(self.out, self.grad)

    def plan(self, blocks: Launches) -> AttentionCall:
        """Return the call with these block sizes."""
        return AttentionCall(0.125, self.window, None, "none", blocks)

    def gradients(self, kernel: str, launch: Launch) -> list[Tensor]:
        """Return the gradients that a kernel computes."""
        own, plan = self.operands, self.plan(self.present._replace(**{kernel: launch}))
        far_query, far_key = (None if x is None else torch.empty_like(x) for x in (own.far_query, own.far_key))
        query, key, value = map(torch.empty_like, (own.query, own.key, own.value))
        results = Operands(query, key, far_query, far_key, value, None, None)
        if kernel == "key_gradients":
            attention_backward.key_gradients(own, plan, results, self.saved)
            return [x for x in (key, far_key, value) if x is not None]
        attention_backward.query_gradients(own, plan, results, self.saved, with_coefficients=False)
        return [x for x in (query, far_query) if x is not None]


def measure(problem: Problem, kernel: str, launch: Launch, rounds: int, values: bool) -> dict[str, Any]:
    """Time a launch beside the present one.

    Raises:
        AssertionError: a gradient differs too much from that of the present launch.
    """
    present = getattr(problem.present, kernel)
    for own, other in zip(problem.gradients(kernel, launch), problem.gradients(kernel, present), strict=True):
        error = float((own.double() - other.double()).norm() / other.double().norm())
        assert not values or error <= ERROR, f"a gradient differs from that of the present launch by {error:.2e}"
    calls = {each: partial(problem.gradients, kernel, each) for each in dict.fromkeys((present, launch))}
    times = interleaved(calls, rounds, problem.grad.device)
    query = problem.operands.query
    capability = torch.cuda.get_device_capability() if query.is_cuda else (9, 0)
    return {
        "architecture": architecture(capability),
        "kernel": kernel,
        "launch": list(launch),
        "base": list(present),
        "segments": 1 if problem.window is None else 2,
        "row_class": row_class(query),
        "length": query.shape[2],
        "milliseconds": round(1e3 * statistics.median(times[launch]), 4),
    } | compared(times[launch], times[present])


def winners(lines: Sequence[dict[str, Any]], told: dict[str, Any]) -> dict[str, Any]:
    """Return the table of `MEASURED` for these results: for each kernel the launch that saves the most time, if it
    saves at least `GAIN` at every length (upper quartile). `told` is added to each entry.
    """
    found: defaultdict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line.get("status") == "ok":
            row = str(line["architecture"]), f"{line['segments']} {line['row_class']}", line["kernel"]
            found[(*row, tuple(line["launch"]))].append(line)
    lengths = {line["length"] for each in found.values() for line in each}
    table: dict[str, Any] = {}
    for (number, row, kernel, launch), each in sorted(found.items(), key=str):
        if {line["length"] for line in each} != lengths or any(line["ratio_quartiles"][-1] > 1 - GAIN for line in each):
            continue
        ratio = statistics.geometric_mean(line["ratio"] for line in each)
        kernels = table.setdefault(number, {}).setdefault(row, {})
        if kernel not in kernels or ratio < kernels[kernel]["ratio"]:
            kernels[kernel] = {"launch": list(launch), "ratio": round(ratio, 3), "replaces": each[0]["base"], **told}
    return table


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return both tables as one. Entries of the new table replace those of the old one."""
    numbers = sorted({*old, *new})
    rows = {number: sorted({*old.get(number, {}), *new.get(number, {})}) for number in numbers}
    return {
        number: {row: {**old.get(number, {}).get(row, {}), **new.get(number, {}).get(row, {})} for row in rows[number]}
        for number in numbers
    }


def record(file: Path, table: Path = MEASURED) -> int:
    """Write the winners in `file` to the table that the kernels read."""
    lines = read_lines(file)
    if not any(line.get("status") == "ok" for line in lines):
        print(f"sweep: {file}: has no results; run the script on a GPU with --output {file}", file=sys.stderr)
        return 2
    here = next((line for line in lines if "machine" in line), {}).get("machine", {})
    told = {"gpu": here.get("gpu"), "commit": here.get("versions", {}).get("commit")}
    found = winners(lines, told)
    table.write_text(json.dumps(merged(json.loads(table.read_text()), found), indent=1) + "\n")
    print(f"{table}: {sum(len(kernels) for rows in found.values() for kernels in rows.values())} launches recorded")
    return 0


def compile_all(arguments: Sequence[str], count: int) -> None:
    """Compile every candidate in `count` processes, so that Triton's cache on the disk has them all."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    children = [subprocess.Popen([*command, "--compile", f"{index}/{count}"]) for index in range(count)]
    for child in children:
        child.wait()  # a candidate that fails here fails again when it is timed, and is then recorded


def calls(options: argparse.Namespace) -> Iterator[tuple[str, int, int, str, Launch]]:
    """Yield the name of each case, its segments, its length, its kernel and its launch."""
    chosen = product(options.segments, options.lengths, CANDIDATES.items())
    for segments, length, (kernel, launches) in chosen:
        for launch in launches[: options.candidates]:
            name = " ".join(f"{value}" for value in launch[:4])
            yield f"{kernel}, {segments} segments, {length}: {name}", segments, length, kernel, launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all candidates, or record the winners; return 1 if every candidate of the sweep failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--output", type=Path, metavar="FILE.jsonl", help="file of results")
    action.add_argument("--record", type=Path, metavar="FILE.jsonl", help="record the winners of this file")
    parser.add_argument("--segments", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="tokens (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="counted measurements (default: %(default)s)")
    parser.add_argument("--candidates", type=int, metavar="N", help="only the first N launches of each kernel")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--without-values", action="store_true", help="compare no values")
    parser.add_argument("--compile", metavar="INDEX/COUNT", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.record is not None:
        return record(options.record)
    problems: dict[tuple[int, int], Problem] = {}

    def problem(segments: int, length: int) -> Problem:
        if (segments, length) not in problems:
            dtype = getattr(torch, options.dtype)
            problems[segments, length] = Problem(segments, length, options.head_dim, dtype, options.device)
        return problems[segments, length]

    found = list(calls(options))
    if options.compile is not None:
        index, _, count = options.compile.partition("/")
        for _, segments, length, kernel, launch in found[int(index) :: int(count)]:
            try:
                problem(segments, length).gradients(kernel, launch)
            except Exception as error:
                print(f"sweep: {kernel} {launch}: {error}", file=sys.stderr)
        return 0
    if options.device != "cpu":
        compile_all(given, max(1, min(MOST, len(os.sched_getaffinity(0)) // 2)))
    cases = {
        name: lambda segments=segments, length=length, kernel=kernel, launch=launch: measure(
            problem(segments, length), kernel, launch, options.rounds, not options.without_values
        )
        for name, segments, length, kernel, launch in found
    }
    run_cases({"machine": lambda: {"machine": machine()}, **cases}, options.output)
    return int(not any("launch" in line for line in read_lines(options.output)))


if __name__ == "__main__":
    sys.exit(main())
