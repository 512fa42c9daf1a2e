"""Check whole training runs: a killed run that resumes, several GPUs, and NCCL's collectives.

    python tools/gpu/ranks.py --check resume --folder results/gpu/resume --output FILE.jsonl
    python tools/gpu/ranks.py --check speed --ranks 8 --folder results/gpu/speed --output FILE.jsonl

Every check trains a model on the built-in corpus with `megatron-coca train` and reads its metrics.jsonl. `--inputs`
replaces the configuration, so that the checks also run on a CPU.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.gpu.cases import read_lines, run_cases

INPUTS = ("configs/350M/roformer_coca.yml", "configs/cluster/gpu1.yml", "data_types=null")
"""The 350M model in bfloat16, with ZeRO 1."""
STEPS = 16
SAVED = 9
"""Interval of checkpoints in steps: a run saves one checkpoint on its way and one at its end."""
BATCH = 128
"""Samples in a step, the same for any number of ranks."""
ROUNDING = 5e-3
"""Largest allowed relative difference between losses if bfloat16 gradients were summed in different orders."""
WAIT = 170.0
"""Seconds to wait for a step before a run counts as blocked."""
Arguments = argparse.Namespace
Losses = dict[int, float]


def command(options: Arguments, save: Path, ranks: int, *keys: str) -> list[str]:
    """Return the command of a training run."""
    shared = (
        f"train_iters={STEPS}",
        f"train_batch_size={BATCH}",
        "gradient_accumulation_steps=null",
        "vocab_size=null",
        f"data_root={options.folder.resolve().parent / 'data'}",
        "eval_interval=1000",
        "eval_iters=1",
        "log_interval=1",
        "checkpoint_factor=1000",
        "keep_last_n_checkpoints=null",
        f"save={save}",
    )
    inputs = [*options.inputs, *shared, *options.keys, *keys]
    wrapper = ("-m", "tests.pretend", "run") if options.stand_in else ()
    return [sys.executable, *wrapper, "train.py", *inputs, "--num_gpus", str(ranks)]


def train(options: Arguments, name: str, ranks: int, *keys: str, keep: bool = False) -> list[dict[str, Any]]:
    """Train a run in an empty folder to its end, and return its metrics. Checkpoints are deleted unless `keep` is set,
    because a checkpoint of the 350M model takes 6 GB.

    Raises:
        RuntimeError: the run failed; the message contains the end of its output.
    """
    save = options.folder.resolve() / name
    shutil.rmtree(save, ignore_errors=True)
    done = subprocess.run(command(options, save, ranks, *keys), cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode:
        raise RuntimeError(f"train.py: exit status {done.returncode}: {done.stderr[-400:]}")
    metrics = read_lines(save / "metrics.jsonl")
    if not keep:
        shutil.rmtree(save)
    return metrics


def losses(metrics: Sequence[dict[str, Any]]) -> Losses:
    """Return the loss of every step."""
    return {int(line["step"]): float(line["loss"]) for line in metrics if line.get("loss") is not None}


def rate(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median speed of the second half of a run."""
    later = [line for line in metrics if "tokens_per_second" in line][len(metrics) // 2 :]
    figures = {"tokens_per_second": round(statistics.median(line["tokens_per_second"] for line in later))}
    utilizations = [line["mfu"] for line in later if "mfu" in line]
    memory = max(line["peak_memory_gib"] for line in later)
    mfu = round(statistics.median(utilizations), 4) if utilizations else "unknown"
    return figures | {"mfu": mfu, "peak_memory_gib": round(memory, 2)}


def same_bits(one: Losses, other: Losses) -> None:
    """Raise an AssertionError if losses differ. It names the first step at which they do."""
    assert one.keys() == other.keys(), f"steps {sorted(one.keys() ^ other.keys())} are only in one run"
    different = [step for step in sorted(one) if one[step] != other[step]]
    assert not different, f"step {different[0]}: loss {one[different[0]]!r} and {other[different[0]]!r}"


def nearly(one: Losses, other: Losses) -> float:
    """Return the largest relative difference, and raise an AssertionError if it is more than rounding."""
    assert one.keys() == other.keys(), f"steps {sorted(one.keys() ^ other.keys())} are only in one run"
    errors = {step: abs(one[step] - other[step]) / abs(other[step]) for step in one}
    # `max` would pass over NaN.
    step = max(errors, key=lambda each: math.inf if math.isnan(errors[each]) else errors[each])
    error = errors[step]
    assert error <= ROUNDING, f"step {step}: losses {one[step]} and {other[step]} differ by {error:.1e}"
    return error


def resume(options: Arguments) -> dict[str, Any]:
    """Kill a run by SIGKILL after its checkpoint, resume it, and compare it with a run that was not killed."""
    keys = (f"checkpoint_factor={SAVED}", "async_save=false", "deterministic=true")
    whole = losses(train(options, "whole", 1, *keys))
    save = options.folder.resolve() / "killed"
    shutil.rmtree(save, ignore_errors=True)
    with (options.folder / "killed.log").open("w") as log:
        process = subprocess.Popen(
            command(options, save, 1, *keys), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            killed_at = _wait_for(save, SAVED + 2, process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert killed_at < STEPS, f"train.py: reached its last step, {STEPS}, before it was killed"
    done = subprocess.run([*command(options, save, 1, *keys), "--auto-resume"], cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"train.py --auto-resume: exit status {done.returncode}")
    same_bits(losses(read_lines(save / "metrics.jsonl")), whole)
    shutil.rmtree(save)
    return {"steps": len(whole), "killed_at_step": killed_at, "last_loss": whole[max(whole)]}


def _wait_for(save: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a run has reported `step` and written a checkpoint; return the last reported step."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        reached = max(losses(read_lines(save / "metrics.jsonl")), default=0)
        if reached >= step and (save / "latest").exists():
            return reached
        if process.poll() is not None:
            raise RuntimeError(f"train.py: ended with status {process.returncode} before step {step}")
        time.sleep(0.05)
    raise RuntimeError(f"train.py: step {step} was not reached in {WAIT:.0f} seconds")


def speed(options: Arguments) -> dict[str, Any]:
    """Measure the speed of ZeRO 1 with overlapped reductions."""
    return rate(train(options, "speed", options.ranks)) | {"ranks": options.ranks}


def wait(options: Arguments) -> dict[str, Any]:
    """Compare both values of `reduction_wait`: they may change the speed but no bit of a loss."""
    runs = {
        each: train(options, f"wait_{each}", options.ranks, f"reduction_wait={each}", "deterministic=true")
        for each in ("device", "stream")
    }
    same_bits(losses(runs["stream"]), losses(runs["device"]))
    return {f"tokens_per_second_{each}": rate(metrics)["tokens_per_second"] for each, metrics in runs.items()}


def elastic(options: Arguments) -> dict[str, Any]:
    """Resume a checkpoint of all ranks on half of them."""
    whole = losses(train(options, "elastic", options.ranks, f"checkpoint_factor={SAVED}", keep=True))
    folder, half = options.folder.resolve(), max(1, options.ranks // 2)
    rest = losses(train(options, "elastic_half", half, f"load={folder / 'elastic'}", f"iteration={SAVED}"))
    shutil.rmtree(folder / "elastic")
    return {"ranks": half, "difference": nearly(rest, {step: loss for step, loss in whole.items() if step > SAVED})}


def one_gpu(options: Arguments) -> dict[str, Any]:
    """Compare the losses of all ranks with those of one rank that computes the same batches."""
    many = losses(train(options, "many", options.ranks))
    return {"difference": nearly(losses(train(options, "one", 1)), many), "last_loss": many[max(many)]}


def collectives(options: Arguments) -> dict[str, Any]:
    """Compare sums and gathers over all ranks, in every dtype that training uses, with their exact values."""
    import torch

    torch.multiprocessing.spawn(_rank, (options.ranks, str(options.folder.resolve() / "store")), options.ranks)
    return {"ranks": options.ranks, "dtypes": "float32, bfloat16, float16, float64"}


def _rank(rank: int, ranks: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            own = torch.full((100_003,), rank + 1, dtype=dtype, device=device)  # small integers are exact in any dtype
            total = own.clone()
            dist.all_reduce(total)
            assert bool((total == ranks * (ranks + 1) // 2).all()), f"all_reduce, {dtype}"
            gathered = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(gathered, own)
            assert all(bool((x == each + 1).all()) for each, x in enumerate(gathered)), f"all_gather, {dtype}"
            first = own.clone()
            dist.broadcast(first, 0)
            assert bool((first == 1).all()), f"broadcast, {dtype}"
            if cuda:  # Gloo has no reduce_scatter
                part = torch.empty(1000, dtype=dtype, device=device)
                dist.reduce_scatter(part, [own[:1000].contiguous() for _ in range(ranks)])
                assert bool((part == ranks * (ranks + 1) // 2).all()), f"reduce_scatter, {dtype}"
    finally:
        dist.destroy_process_group()


CHECKS: dict[str, Callable[[Arguments], dict[str, Any]]] = {
    "resume": resume,
    "collectives": collectives,
    "speed": speed,
    "wait": wait,
    "elastic": elastic,
    "one_gpu": one_gpu,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a check; return 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", choices=CHECKS, required=True, help="the check")
    parser.add_argument("--folder", type=Path, required=True, metavar="DIR", help="folder of the runs")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file of results")
    parser.add_argument("--ranks", type=int, default=8, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--inputs", nargs="+", default=INPUTS, metavar="CONFIG.yml", help="the model and its training")
    parser.add_argument("--keys", nargs="+", default=[], metavar="key=value", help="further keys")
    parser.add_argument("--stand-in", action="store_true", help="train on the stand-in device (tests/pretend)")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "store").unlink(missing_ok=True)
    return run_cases({options.check: partial(CHECKS[options.check], options)}, options.output)


if __name__ == "__main__":
    sys.exit(main())
