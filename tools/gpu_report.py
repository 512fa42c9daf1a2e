"""Run the first measurements on a GPU, and write one page about them.

    python tools/gpu_report.py                 # or: make gpu-report
    python tools/gpu_report.py --first         # the most important measurements, in one call
    python tools/gpu_report.py --gpus 8        # the plan for one host with 8 GPUs
    python tools/gpu_report.py --dry-run       # print parts, limits and commands; needs no GPU

The report consists of parts, with the most useful answers first. Each part has one or more processes with their own
time limits. One call takes less than ten minutes (--minutes). The same command continues where the last one ended. A
process that was killed runs again. A process that finished does not run again, unless its code, a library or the type
of the GPU changed. After every process the page is written again. The report installs nothing.

The exit status is 0 if all parts are done, 1 if a part failed or lacks a package, 2 if there is no usable GPU or
no writable folder or an option is wrong, 3 if parts are left for the next call, and 130 after Ctrl-C.
"""

import argparse
import importlib.util
import math
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.gpu.plans import FIRST, PLANS, STAND_IN, PlanPart

NEEDED = ("torch", "triton", "pydantic")
"""Packages without which no part runs."""
LEFT = 3
"""Exit status if parts are left for the next call."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are missing and write the page; return the exit status."""
    begin, options = time.monotonic(), parser().parse_args(arguments)
    if options.first and options.gpus > 1:
        parser().error(f"--first --gpus {options.gpus}: the first plan is for one GPU; leave out one of the two")
    if options.output is None:
        options.output = Path("results/gpu_first" if options.first else "results/gpu")
    chosen = FIRST if options.first else PLANS[options.gpus]
    whole = {name: _launched(part, options) for name, part in chosen.items()}
    plan = selected(whole, options)
    if options.dry_run:
        print_plan(plan)
        return 0
    if problem := unusable(options.gpus, not options.stand_in):
        print(f"gpu_report: {problem}", file=sys.stderr)
        return 2
    from megatron_coca.support.errors import InputError
    from megatron_coca.work.locks import exclusive_lock

    busy = f"{options.output}: another call writes its results there; wait until it has ended"
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(options.output / ".lock", InputError, busy):
            return run(plan, whole, options, begin + 60 * options.minutes)
    except InputError as error:
        print(f"gpu_report: {error}", file=sys.stderr)
    except OSError as error:
        place = error.filename or options.output
        print(
            f"gpu_report: {place}: {error.strerror}; free some space or name another folder, --output", file=sys.stderr
        )
    except KeyboardInterrupt:
        print("gpu_report: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 2


def run(
    plan: Mapping[str, PlanPart], whole: Mapping[str, PlanPart], options: argparse.Namespace, deadline: float
) -> int:
    """Run the parts of `plan` that are missing, and write the page of the `whole` plan; return the exit status."""
    from megatron_coca.support.atomic_write import write_file
    from tools.gpu.page import page
    from tools.gpu.runner import DONE, MISSING, carry_caches, execute, items, read_record, waiting
    from tools.records import machine

    here = machine()
    if options.stand_in:
        here["gpu"] = f"the stand-in for {here['gpu']}, where kernels compute nothing and times are host times"
    carry_caches(options.caches, options.output)
    found, everything = items(plan, options.output), items(whole, options.output)
    file, left = options.output / "gpu_report.md", list(waiting(found, here))
    try:
        while left and time.monotonic() + left[0].run.seconds <= deadline:
            item = left.pop(0)
            print(f"{item.title}: {plan[item.part].title} ({item.run.seconds} s at most)", file=sys.stderr)
            record = execute(item, here)
            write_file(file, page(whole, everything, here))
            detail = f" ({', '.join(record['missing'])} is not installed)" if record["status"] == MISSING else ""
            print(f"{item.title}: {record['status']}{detail} after {record['seconds']:.0f} s", file=sys.stderr)
    finally:
        write_file(file, page(whole, everything, here))
    print(file)
    if left:
        print(f"gpu_report: {len(left)} of {len(found)} runs are left; run the same command again", file=sys.stderr)
        return LEFT
    return int(any(read_record(item).get("status") != DONE for item in found))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = "folder for records, logs, results and the page (default: results/gpu, or results/gpu_first)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    first = "the plan of one call for one GPU: the most important measurements, in less than ten minutes"
    parser.add_argument("--first", action="store_true", help=first)
    parser.add_argument("--gpus", type=int, choices=PLANS, default=1, help="GPUs of the plan (default: %(default)s)")
    caches = "folder of compiled kernels to begin with, from `make gpu-caches` (default: wheels/cache)"
    parser.add_argument("--caches", type=Path, default=ROOT / "wheels/cache", metavar="DIR", help=caches)
    only = "run only these parts, or runs such as step.coca_16, in this order"
    parser.add_argument("--only", nargs="+", metavar="PART", help=only)
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="leave out these parts or runs")
    parser.add_argument(
        "--minutes", type=positive, default=9.5, metavar="M", help="time for this call (default: %(default)s)"
    )
    limits = "multiply the limits of all processes, for a slow machine (default: %(default)s)"
    parser.add_argument("--limits", type=positive, default=1.0, metavar="FACTOR", help=limits)
    parser.add_argument("--dry-run", action="store_true", help="print parts and commands")
    stand_in = "run on the stand-in device (tests/pretend): compare no values, and reduce some sizes"
    parser.add_argument("--stand-in", action="store_true", help=stand_in)
    return parser


def positive(text: str) -> float:
    """Return the positive number of an option."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number")
    return number


def selected(plan: Mapping[str, PlanPart], options: argparse.Namespace) -> dict[str, PlanPart]:
    """Return the parts and runs that the options select, in the order of --only if that is given.

    Exits with status 2 and a message if the options name a part of another plan, if no run is left, or if a limit is
    longer than the call.
    """
    titles = {name: [f"{name}.{run}" for run in part.runs] for name, part in plan.items()}
    known = {**titles, **{title: [title] for each in titles.values() for title in each}}
    if other := [name for name in (*(options.only or ()), *options.skip) if name not in known]:
        names, parts = ", ".join(other), ", ".join(plan)
        chosen_plan = "--first" if options.first else f"--gpus {options.gpus}"
        parser().error(f"--only, --skip: {names}: not in the plan {chosen_plan}; its parts are {parts}")
    skipped = {title for name in options.skip for title in known[name]}
    wanted = [title for name in (options.only or plan) for title in known[name] if title not in skipped]
    chosen: dict[str, PlanPart] = {}
    for title in wanted:
        name, _, run = title.partition(".")
        runs = chosen[name].runs if name in chosen else {}
        chosen[name] = plan[name]._replace(runs=runs | {run: plan[name].runs[run]})
    if not chosen:
        parser().error(f"--only, --skip: select no part of this plan; its parts are {', '.join(plan)}")
    longest = max(run.seconds for part in chosen.values() for run in part.runs.values())
    if longest > 60 * options.minutes:
        parser().error(f"--minutes {options.minutes:g}: a part has a limit of {longest} seconds; allow more")
    return chosen


def _launched(part: PlanPart, options: argparse.Namespace) -> PlanPart:
    """Apply --limits and --stand-in to the runs of a part."""
    runs = {}
    for name, run in part.runs.items():
        command = run.command
        if options.stand_in:
            script, _, _ = command.partition(" ")
            command = f"{command} {STAND_IN[script]}"
            command = command if script == "-m" else f"-m tests.pretend run {command}"
        runs[name] = run._replace(command=command, seconds=max(1, round(run.seconds * options.limits)))
    return part._replace(runs=runs)


def print_plan(plan: Mapping[str, PlanPart]) -> None:
    """Print the parts, their limits and commands."""
    start = 0.0
    for name, part in plan.items():
        start += part.seconds / 60
        print(f"{name}: {part.title} ({part.seconds / 60:.3g} minutes at most, {start:.3g} in all)")
        for key, run in part.runs.items():
            print(f"  {key}, {run.seconds} s: {shlex.join(['python', *shlex.split(run.command)])}")


KERNEL = """
import torch
from megatron_coca.kernels.cross_entropy import cross_entropy_in_place
logits, labels = torch.randn(4, 100, device="cuda"), torch.tensor([1, 2, 3, 4], device="cuda")
expected = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
found = cross_entropy_in_place(logits, labels, -1).double()
"""
CHECK = "torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)"
"""A program that compiles and runs one Triton kernel, and the check of its result."""


def unusable(gpus: int = 1, values: bool = True) -> str | None:
    """Return a message with the remedy if the machine cannot run the parts; None if it can. Without `values`, the
    result of the first kernel is not compared.
    """
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        names = ", ".join(absent)
        return f"{names}: not installed; run `make gpu-wheels` where packages can be fetched (benchmarks/gpu_report.md)"
    import torch

    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__}: this build has no CUDA; on a machine with a GPU, remove .venv and run "
            "`make gpu-report TORCH_INDEX=`"
        )
    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} finds no usable GPU; use a machine with one. If nvidia-smi lists one, its "
            f"driver is too old for CUDA {torch.version.cuda}"
        )
    if torch.cuda.device_count() < gpus:
        return f"--gpus {gpus}: this machine has {torch.cuda.device_count()}; use the plan --gpus 1"
    return missing_compiler(KERNEL + CHECK if values else KERNEL)


def missing_compiler(program: str) -> str | None:
    """Return a message if Triton cannot compile and run a kernel."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return "a Triton kernel did not end in 120 seconds; look at the GPU with nvidia-smi"
    if done.returncode == 0:
        return None
    end = (done.stdout + done.stderr)[-2000:]
    return (
        "a Triton kernel does not run here; unless the end of its output names another reason, install a C compiler "
        f"and Python.h (gcc, python3-dev):\n{end}"
    )


if __name__ == "__main__":
    sys.exit(main())
