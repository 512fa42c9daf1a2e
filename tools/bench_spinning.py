"""Compare settings of how long OpenMP threads spin at a barrier, on idle cores and beside a busy process.

    python tools/bench_spinning.py
    python tools/bench_spinning.py --settings GOMP_SPINCOUNT=3000 OMP_WAIT_POLICY=passive --kinds train --rounds 9

A thread that has done its share of a parallel loop waits for the other threads at a barrier. It spins before it sleeps.
On idle cores spinning is fast, because a sleeping thread wakes late. If another process needs the core, a spinning
thread keeps the core from the thread that all others wait for (docs/speed.md). The setting `default` sets no variable.

Every setting has a process of its own, because libgomp reads its settings when it is loaded. The processes take turns
in every round, for --seconds each, first on idle cores and then beside --busy processes that compute without end:

- train: steps of the quickstart's RoFormer (4 layers of width 128, 64 x 64 tokens), with the loss's gradient and AdamW
- score: losses of 1,024 tokens by the same model, as perplexity needs them
- decode: tokens after a cache of 256 tokens, one at a time

The script appends one JSON line for each kind of work, setting and number of busy processes to --output.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.config import load_config
from megatron_coca.model import LanguageModelLoss, build_model
from megatron_coca.support.host import keep_freed_memory
from tools.records import ChildProcess, append_records, benchmark_parser, compared

SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""The variables of libgomp, PyTorch's OpenMP library on Linux. It reads them when it is loaded."""
DEFAULT = "default"
COUNTS = (100, 1_000, 3_000, 10_000, 30_000, 100_000)
MODEL = ("configs/quickstart/roformer.yml",)
BATCH, LENGTH, SCORED, CACHED = 64, 64, 1024, 256


def training() -> Callable[[], int]:
    """Return a function that trains one step and returns its tokens."""
    model = LanguageModelLoss(build_model(load_config(MODEL), "cpu")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(1024, (BATCH, LENGTH + 1))

    def step() -> int:
        model(tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return BATCH * LENGTH

    return step


def scoring() -> Callable[[], int]:
    """Return a function that computes the losses of one input and returns its tokens."""
    model = LanguageModelLoss(build_model(load_config(MODEL), "cpu")).eval()
    tokens = torch.randint(1024, (1, SCORED + 1))

    @torch.inference_mode()
    def score() -> int:
        model(tokens)
        return SCORED

    return score


def decoding() -> Callable[[], int]:
    """Return a function that decodes 16 tokens after a new cache and returns their number."""
    model = build_model(load_config(MODEL), "cpu").eval()
    tokens = torch.randint(1024, (1, CACHED))

    @torch.inference_mode()
    def decode() -> int:
        cache = model.new_cache(capacity=CACHED + 16)
        new = tokens
        for _ in range(16):
            new = model.logits(model.hidden_states(new, cache=cache, last=1)[:, -1]).argmax(-1, keepdim=True)
        return 16

    return decode


KINDS: dict[str, Callable[[], Callable[[], int]]] = {"train": training, "score": scoring, "decode": decoding}


def serve(kinds: list[str]) -> Callable[[str, float], tuple[float, float]]:
    """Return a function (kind, seconds) -> tokens per second, and the mean number of processors in use."""
    keep_freed_memory()
    torch.manual_seed(0)
    works = {kind: KINDS[kind]() for kind in kinds}

    def measure(kind: str, seconds: float) -> tuple[float, float]:
        works[kind]()  # wakes the threads
        tokens, used, start = 0, time.process_time(), time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            tokens += works[kind]()
        return tokens / elapsed, (time.process_time() - used) / elapsed

    return measure


def child(setting: str, kinds: list[str]) -> ChildProcess:
    """Start a process with a setting, `NAME=VALUE`. In this process, the other variables of `SETTINGS` are not set."""
    before = {name: os.environ.pop(name, None) for name in SETTINGS}
    if setting != DEFAULT:
        name, _, value = setting.partition("=")
        os.environ[name] = value
    try:
        return ChildProcess(serve, kinds)
    finally:
        for name in SETTINGS:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let `count` other processes compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.3 if others else 0.0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def records(options: Any) -> Iterator[dict[str, Any]]:
    """Measure and yield the records."""
    children = {setting: child(setting, options.kinds) for setting in (DEFAULT, *options.settings)}
    for kind in options.kinds:
        for number in dict.fromkeys((0, options.busy)):
            measured: dict[str, list[tuple[float, float]]] = {setting: [] for setting in children}
            for turn in range(options.rounds + 1):
                # Half of the rounds run the settings in reverse order, so that a slow drift of the machine favours no
                # setting.
                for setting in list(children)[:: 1 if turn % 2 else -1]:
                    with busy(number):
                        measured[setting].append(children[setting](kind, options.seconds))
            speeds = {setting: [speed for speed, _ in turns[1:]] for setting, turns in measured.items()}
            for setting, own in speeds.items():
                yield {
                    "benchmark": "spinning",
                    **{"kind": kind, "setting": setting, "busy": number, "seconds": options.seconds},
                    "tokens_per_second": statistics.median(own),
                    "processors": statistics.median(used for _, used in measured[setting][1:]),
                    "against_default": compared(own, speeds[DEFAULT]),
                }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and append the records; return the exit status."""
    parser = benchmark_parser(__doc__, "spinning.jsonl", rounds=7)
    settings = [f"GOMP_SPINCOUNT={count}" for count in COUNTS]
    parser.add_argument("--settings", nargs="*", default=[*settings, "OMP_WAIT_POLICY=passive"], help="NAME=VALUE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of work; default: all")
    parser.add_argument("--busy", type=int, default=1, help="other processes that compute (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one turn (default: %(default)s)")
    options = parser.parse_args(arguments)
    for setting in options.settings:
        if setting.partition("=")[0] not in SETTINGS:
            parser.error(f"--settings: {setting!r} is not one of {', '.join(SETTINGS)} with a value")
    for record in records(options):
        append_records(options.output, [record])
        low, middle, high = record["against_default"]["ratio_quartiles"]
        print(
            f"{record['kind']}, {record['busy']} busy, {record['setting']}: "
            f"{record['tokens_per_second']:,.0f} tokens/s, "
            f"{middle:.2f}x the default ({low:.2f} to {high:.2f}), {record['processors']:.2f} processors",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
