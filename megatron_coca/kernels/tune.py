"""Times block sizes of the attention kernels on the current GPU, and prints the fastest rows of plan.CONFIGS.

python -m megatron_coca.kernels.tune --head-dim 64 --length 4096
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench

from megatron_coca.kernels.attention import flash_attention
from megatron_coca.kernels.plan import Blocks, Launch, blocks_for, row_class

SIZES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3)
UNFIT = (OutOfResources, PTXASError, CompilationError)
"""Compiler errors for blocks that exceed the device's resources."""

Call = Callable[[Blocks], float]


def candidates() -> Iterator[Launch]:
    """The candidate launches."""
    return (Launch(*numbers) for numbers in product(SIZES, SIZES, WARPS, STAGES))


def best(measure: Callable[[Launch], float], launches: Sequence[Launch], tell: Callable[[str], None]) -> Launch:
    """The launch with the shortest time; those that exceed the device's resources are reported and skipped.

    Raises:
        RuntimeError: none of them fits.
    """
    times: dict[Launch, float] = {}
    for launch in launches:
        try:
            times[launch] = measure(launch)
            tell(f"# {launch}: {times[launch]:.3f} ms")
        except UNFIT as error:
            tell(f"# {launch}: {type(error).__name__}")
    if not times:
        raise RuntimeError(f"none of {len(launches)} block sizes fits this device; add smaller ones to tune.SIZES")
    return min(times, key=times.__getitem__)


def tune(query: Tensor, key: Tensor, segments: int, launches: Sequence[Launch], tell: Callable[[str], None]) -> Blocks:
    """The best launch of each kernel for these operands, the other kernels as the table has them.

    The forward kernel is timed alone. The kernels of the gradients are timed within a backward pass, where only one of
    them changes.
    """
    present = blocks_for(query, segments)
    forward, backward = _measures(query, key, segments)
    chosen = present._replace(forward=best(lambda x: forward(present._replace(forward=x)), launches, tell))
    for name in ("key_gradients", "query_gradients"):

        def measure(launch: Launch, name: str = name, fixed: Blocks = chosen) -> float:
            return backward(fixed._replace(**{name: launch}))

        chosen = chosen._replace(**{name: best(measure, launches, tell)})
    return chosen


def _measures(query: Tensor, key: Tensor, segments: int) -> tuple[Call, Call]:
    """Milliseconds of the forward and of the backward pass; a second segment begins at a quarter of the length."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, key)]
    q, k, v = leaves
    two = segments == 2

    def call(blocks: Blocks) -> Tensor:
        return flash_attention(
            q,
            k,
            v,
            q.shape[3] ** -0.5,
            far_query=q if two else None,
            far_key=k if two else None,
            window=k.shape[2] // 4 if two else None,
            blocks=blocks,
        )

    def backward(blocks: Blocks) -> float:
        out = call(blocks)
        grad = torch.ones_like(out)
        return do_bench(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), return_mode="median")

    return lambda blocks: do_bench(lambda: call(blocks), return_mode="median"), backward


def main() -> None:
    """Prints `(segments, bytes of a row): Blocks(...),` for one and for two segments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is at hand, and block sizes are timed on one")
    shape = (1, options.heads, options.length, options.head_dim)
    query = torch.randn(shape, device="cuda", dtype=getattr(torch, options.dtype))
    for segments in (1, 2):
        blocks = tune(query, torch.randn_like(query), segments, list(candidates()), print)
        print(f"({segments}, {row_class(query)}): {blocks},")


if __name__ == "__main__":
    main()
