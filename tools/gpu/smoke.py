"""Run every kernel forward and backward, and compare the results with float64.

    python tools/gpu/smoke.py --output results/gpu/smoke.kernels.jsonl

On a GPU the kernels run in bfloat16. With `--device cpu --dtype float32` and TRITON_INTERPRET=1, Triton's interpreter
runs them. `--without-values` only launches them, for the stand-in device (tests/pretend), where kernels
compute nothing.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_coca.attention.build import BACKENDS
from tests.parity import loss_cases, operand_cases, triton_cases
from tests.parity.loss_cases import HeadCase
from tests.parity.triton_cases import Case
from tools.gpu.cases import run_in_parallel

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64}
ATTENTION: dict[str, tuple[str, Case]] = {
    "sdpa": ("sdpa", Case(512, **HEADS)),
    "triton": ("triton", Case(500, **HEADS)),
    "triton, two segments": ("triton", Case(500, window=100, far=True, **HEADS)),
    "triton, packed documents": ("triton", Case(500, documents=5, **HEADS)),
    "triton, linear bias": ("triton", Case(500, formula="linear", **HEADS)),
    "triton, polar": ("triton", Case(500, rotated=64, **HEADS)),
    "triton, polar with constant angles": ("triton", Case(500, rotated=16, angles=True, **HEADS)),
    "flex, packed documents": ("flex", Case(512, documents=5, **HEADS)),
    "flex, linear bias": ("flex", Case(512, formula="linear", **HEADS)),
    "merge, two segments": ("merge", Case(500, window=100, far=True, **HEADS)),
    "merge, window": ("merge", Case(500, window=100, **HEADS)),
    "triton, window": ("triton", Case(500, window=100, **HEADS)),
    "triton, window and first keys": ("triton", Case(500, window=100, far=True, first_keys=4, **HEADS)),
    "triton, logarithmic bias": ("triton", Case(500, formula="log", **HEADS)),
    "triton, power bias": ("triton", Case(500, formula="power", **HEADS)),
    **{
        f"triton, heads of {size}": ("triton", Case(300, heads=4, kv_heads=4, head_dim=size))
        for size in (128, 80, 256, 32)
    },
}
"""Name -> backend and case. The kernels of the default configurations come first."""
OPERANDS = [(form, *size) for size in ((64, 64), (16, 64), (20, 80)) for form in ("coca", "rotary", "coca_strict")]
"""(score form, rotated features, head_dim). In some cases, features after the rotary block are not rotated."""
POLAR = {"PoPE": ("softplus", 1, 1, True), "CoCA-Strict with angles": ("relu_mean", 2, 2, True)}
"""Name -> (magnitude, power, features per frequency, whether there are constant angles)."""
LOSSES = {
    "loss head": HeadCase(1000, 64, 50304, 512),
    "loss head, odd vocabulary": HeadCase(300, 64, 5025, 128),
}
SMALL = {"loss head": HeadCase(60, 16, 300, 16), "loss head, odd vocabulary": HeadCase(30, 16, 97, 8)}
"""Smaller cases of the loss head, for the interpreter."""


def adamw(device: str, values: bool) -> None:
    """Run PyTorch's fused AdamW, which updates the float32 weights, and compare the weights with those on the CPU."""
    torch.manual_seed(0)
    weights = [torch.randn(1000, 33, device=each, requires_grad=True) for each in ("cpu", device)]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], fused=True).step()
    if values:
        torch.testing.assert_close(weights[1].detach().cpu(), weights[0].detach())


def cases(device: str, dtype: torch.dtype, values: bool) -> dict[str, Callable[[], None]]:
    """Return all cases. Without `values`, kernels run but nothing is compared."""
    found: dict[str, Callable[[], None]] = {}
    for name, head in (SMALL if device == "cpu" else LOSSES).items():
        found[name] = partial(_head, head, dtype, device, values)
    for form, rotated, head_dim in OPERANDS:
        found[f"operands, {form}, {rotated} of {head_dim}"] = partial(
            _operands, form, rotated, head_dim, dtype, device, values
        )
    for name, polar in POLAR.items():
        found[f"operands, {name}, 64 of 80"] = partial(_polar, polar, dtype, device, values)
    for name, (backend, case) in ATTENTION.items():
        if device != "cpu" or backend != "flex":  # FlexAttention has a backward pass only on CUDA
            found[f"attention, {name}"] = partial(_attention, case, backend, dtype, device, values)
    return found | {"fused AdamW": partial(adamw, device, values)}


def _head(case: HeadCase, dtype: torch.dtype, device: str, values: bool) -> None:
    if values:
        loss_cases.check(case, dtype, device)
    else:
        loss_cases.results(case, dtype, device, "triton")


def _operands(form: str, rotated: int, head_dim: int, dtype: torch.dtype, device: str, values: bool) -> None:
    if values:
        operand_cases.check(form, rotated, head_dim, False, dtype, device, 333 if device != "cpu" else 33)
    else:
        operand_cases.operands(form, rotated, head_dim, False, dtype, True, device, 333)


def _polar(case: tuple[str, int, int, bool], dtype: torch.dtype, device: str, values: bool) -> None:
    if values:
        operand_cases.check_polar(case, 64, 80, False, dtype, device, 333 if device != "cpu" else 33)
    else:
        operand_cases.polar_operands(case, 64, 80, False, dtype, True, device, 333)


def _attention(case: Case, backend: str, dtype: torch.dtype, device: str, values: bool) -> None:
    if device == "cpu":
        case = Case(**(vars(case) | {"length": 70, "window": case.window and 20}))
    if values:
        triton_cases.check(case, dtype, device, BACKENDS[backend])
    else:
        triton_cases.run(case, BACKENDS[backend], dtype, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file of results")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--without-values", action="store_true", help="only launch the kernels")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    found = cases(options.device, getattr(torch, options.dtype), not options.without_values)
    return run_in_parallel(found, options.output, options.share)


if __name__ == "__main__":
    sys.exit(main())
