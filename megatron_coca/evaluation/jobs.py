"""One evaluation on several devices or hosts: `--jobs N` and `--part I/N`.

Perplexity is divided by document (`document_scores`). Other tasks are divided by variant and, if there are few
variants, by length: every process runs the ordinary command for its share, and all processes write to the same result
files (`results.Store`). In both cases the result files equal those of a single process.
"""

import os
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing import get_context
from typing import Any

from megatron_coca.evaluation.labels import full_label
from megatron_coca.evaluation.options import resolve_device
from megatron_coca.evaluation.results import EvaluationError
from megatron_coca.evaluation.tasks import TASKS
from megatron_coca.work.workers import begin_worker

RunTask = Callable[[Namespace], int]
"""A function that runs the command for parsed options. It is at module level, so that processes can import it."""


def shares(args: Namespace, processes: int) -> list[Namespace]:
    """Split an evaluation into shares and return the options of each share. Shares with the longest inputs are first.

    Raises EvaluationError.
    """
    if args.output is None:
        option = "--jobs" if args.part is None else "--part"
        raise EvaluationError(f"{option}: needs --output, because the processes share the result files; add --output")
    if getattr(args, "context_parallel_size", 1) > 1:
        raise EvaluationError("--context-parallel-size: not supported with --jobs and --part; leave one of them out")
    if TASKS[args.task].by_document:
        return [_with(args, part=(part, processes)) for part in range(processes)]
    by_variant = [[variant] for variant in args.variant] or [[]]
    option = TASKS[args.task].divided_by
    values: list[Any] | None = getattr(args, option, None)
    changes = {}
    if values is not None and option != "tasks" and getattr(args, "max_length", 0) is None:
        changes["max_length"] = max(values)  # all shares truncate documents to the same length
    if values is None or len(by_variant) >= 2 * processes:
        return [_with(args, variant=variant, **changes) for variant in by_variant]
    ordered = values if option == "tasks" else sorted(values, reverse=True)
    return [_with(args, variant=variant, **{option: [one]}, **changes) for one in ordered for variant in by_variant]


def _with(args: Namespace, **changes: object) -> Namespace:
    return Namespace(**{**vars(args), "jobs": 1, "part": None, **changes})


def run_part(args: Namespace, run_task: RunTask) -> int:
    """Run the shares of part `args.part` in this process, and return the exit status."""
    part, parts = args.part
    if args.jobs > 1:
        raise EvaluationError("--jobs: not supported with --part; start more parts instead")
    own = shares(args, parts)[part::parts]
    return max((run_task(share) for share in own), default=0)


def run_jobs(args: Namespace, run_task: RunTask) -> int:
    """Run all shares, `args.jobs` at a time. Then run the whole command in this process, to measure missing entries.

    With `--device auto` or `cuda`, the shares are spread over all GPUs.
    """
    waiting = deque(shares(args, args.jobs))
    threads = [
        threading.Thread(target=_run_shares, args=(waiting, device, run_task), daemon=True)
        for device in _devices(args.device, args.jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return run_task(_with(args))


def _devices(name: str, jobs: int) -> list[str]:
    import torch

    if name not in ("auto", "cuda") or resolve_device(name) == "cpu":
        return [name] * jobs
    return [f"cuda:{job % torch.cuda.device_count()}" for job in range(jobs)]


def _run_shares(waiting: deque[Namespace], device: str, run_task: RunTask) -> None:
    while waiting:
        share = waiting.popleft()
        process = get_context("spawn").Process(
            target=_run_share, args=(_with(share, device=device, part=share.part), run_task)
        )
        process.start()
        process.join()
        if process.exitcode is not None and process.exitcode < 0:
            label = full_label(share.label, " ".join(variant[0] for variant in share.variant))
            print(f"megatron-coca evaluate: {label} on {device}: killed by signal {-process.exitcode}", file=sys.stderr)


def _run_share(args: Namespace, run_task: RunTask) -> None:
    """Run a share without printing its tables; the final run of the whole command prints them."""
    begin_worker()
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        sys.exit(run_task(args))
