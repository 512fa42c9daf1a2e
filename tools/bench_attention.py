"""Attention by position method, backend and length: time, speed and memory, against RoPE and against the contraction.

    python tools/bench_attention.py
    python tools/bench_attention.py --methods rotary coca --lengths 2048 8192 --modes forward+backward

What is timed is what a layer does between its projections: operands from views of the packed projection, attention,
and the rows for the output projection. Decoding is one token after `length` cached ones. The frame, which all layers
share, is timed by itself. Ratios are medians of those of single rounds, in which all cases take turns; RoPE is that
with the fastest library backend (sdpa, flash, flex) among the cases, the contraction the paper's by opt_einsum.

Before it is timed, a case is held against the oracle and against float64 (bench_parity.py). One that fails is refused:
no times, a record that says so, and exit status 1. --output is written length by length.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_coca.attention.backends.select import BACKENDS  # noqa: E402
from megatron_coca.attention.compose import build_method  # noqa: E402
from megatron_coca.evaluation.speed.cases import CONTRACTION, EINSUM  # noqa: E402
from megatron_coca.kernels import missing_compiler  # noqa: E402
from megatron_coca.model import keep_freed_memory  # noqa: E402
from tools.bench_cases import METHODS, Case, Shape, configuration  # noqa: E402
from tools.bench_report import tables  # noqa: E402
from tools.bench_run import Bench  # noqa: E402
from tools.bench_steps import MODES  # noqa: E402
from tools.bench_timing import Clock  # noqa: E402
from tools.records import append_records, environment  # noqa: E402

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "heads": 4, "tokens": 1, "training_length": 512, "lengths": (9, 13), "seconds": 60},
    "cuda": {
        "dtype": "bfloat16",
        "heads": 16,
        "tokens": 32768,
        "training_length": 2048,
        "lengths": (9, 17),
        "seconds": 10,
    },
}
"""By device; lengths as the first and the last power of two."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print; 1 where a case was refused, else 0."""
    options = parse(arguments)
    if options.device == "cpu":
        keep_freed_memory()
    else:
        # FlexAttention is compiled anew for each bias and shape, beyond what torch.compile thinks sensible.
        torch._dynamo.config.recompile_limit = 1024
    shape = Shape(
        options.heads,
        options.kv_heads or options.heads,
        options.head_dim,
        options.dtype,
        options.device,
        options.tokens,
        options.training_length,
    )
    clock = Clock(options.device, options.dtype)
    print(f"ceiling: {clock.ceiling / 1e12:.3g} TFLOP/s, a product of two large {options.dtype} matrices")
    cases = list(choose(options.methods, options.backends, shape))
    bench = Bench(shape, cases, clock, options.rounds, options.budget_seconds, options.output, environment(ROOT))
    for length in options.lengths:
        for mode in options.modes:
            bench.measure(length, mode)
    print(f"\n{tables(bench.records)}")
    return int(any(record["status"] == "refused" for record in bench.records))


def choose(methods: list[str], backends: list[str], shape: Shape) -> list[Case]:
    """Every method with every backend that supports it, and with the fused operands where they exist."""
    cases = []
    for name in methods:
        if name == CONTRACTION:
            cases.append(Case(name, EINSUM))
            continue
        config = configuration(name, "torch", shape)
        method = build_method(config.position, config.model)
        fused = method.form.kernel is not None and missing_compiler(shape.device) is None
        for backend in backends:
            reason = BACKENDS[backend].supports(method.needs(shape.device, 0.0))
            if reason is not None:
                print(f"not {name} {backend}: {reason}")
                continue
            cases += [Case(name, backend, operands) for operands in (("torch", "triton") if fused else ("torch",))]
    return cases


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Options, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--lengths", nargs="+", type=positive, help="default: 512 ... 8192 (CPU), 131072 (CUDA)")
    parser.add_argument("--heads", type=positive, help="default: 4 (CPU), 16 (CUDA)")
    parser.add_argument("--kv-heads", type=positive, help="default: as many as --heads")
    parser.add_argument("--head-dim", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, help="tokens in a batch, at least one row: 1 (CPU), 32768 (CUDA)")
    parser.add_argument("--training-length", type=positive, help="L, which windows come from: 512 (CPU), 2048 (CUDA)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 (CPU), bfloat16 (CUDA)")
    parser.add_argument("--device", choices=DEFAULTS, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=positive, default=10, help="counted rounds, after one that is not")
    parser.add_argument("--budget-seconds", type=float, help="of a case at a length: 60 (CPU), 10 (CUDA)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "attention.jsonl")
    options = parser.parse_args(arguments)
    given = DEFAULTS[options.device]
    powers = [2**power for power in range(given["lengths"][0], given["lengths"][1] + 1)]
    filled = {**given, "lengths": powers, "budget_seconds": given["seconds"]}
    for name, value in vars(options).items():
        if value is None and name in filled:
            setattr(options, name, filled[name])
    if options.heads % (options.kv_heads or options.heads):
        parser.error(f"--kv-heads {options.kv_heads} does not divide --heads {options.heads}")
    if options.head_dim % 4:
        parser.error(f"--head-dim {options.head_dim} is no multiple of 4, so there are no pairs to extend")
    try:
        append_records(options.output, [])
    except OSError as error:
        parser.error(f"--output {options.output}: {error.strerror}")
    return options


if __name__ == "__main__":
    sys.exit(main())
