"""Times block sizes of the attention kernels on the current GPU, and prints the fastest rows of plan.CONFIGS.

python -m megatron_coca.kernels.tune --head-dim 64 --lengths 512 4096

Every length has as many rows in its batch as make up `--tokens`, so that a short one fills the device too.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import geometric_mean

import torch
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench

from megatron_coca.kernels.attention import flash_attention
from megatron_coca.kernels.launch_constants import Blocks, Launch, architecture, blocks_for, row_class

SIZES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3)
REGISTERS = {4: (None, 168), 8: (None, 128)}
"""Warps -> limits of the registers: with the compiler's choice, and with one that lets another program run beside."""
UNFIT = (OutOfResources, PTXASError, CompilationError)
"""Compiler errors for blocks that exceed the device's resources."""

Call = Callable[[Blocks], float]
Shape = tuple[Tensor, Tensor]


def candidates() -> Iterator[Launch]:
    """The candidate launches."""
    for numbers in product(SIZES, SIZES, WARPS, STAGES):
        yield from (Launch(*numbers, registers) for registers in REGISTERS[numbers[2]])


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


def tune(shapes: Sequence[Shape], segments: int, launches: Sequence[Launch], tell: Callable[[str], None]) -> Blocks:
    """The best launch of each kernel for these (query, key), the other kernels as the table has them.

    A time is the geometric mean over the shapes, in which each counts alike. The forward kernel is timed alone. The
    kernels of the gradients are timed within a backward pass, where only one of them changes.
    """
    passes = [_measures(query, key, segments) for query, key in shapes]

    def forward(blocks: Blocks) -> float:
        return geometric_mean(measure(blocks) for measure, _ in passes)

    def backward(blocks: Blocks) -> float:
        return geometric_mean(measure(blocks) for _, measure in passes)

    present = blocks_for(shapes[0][0], segments)
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


def shapes(
    lengths: Sequence[int], tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[Shape]:
    """A query and a key per length, each of `tokens` tokens in all, or one row where the length is more."""
    made = []
    for length in lengths:
        query = torch.randn(max(1, tokens // length), heads, length, head_dim, device=device, dtype=dtype)
        made.append((query, torch.randn_like(query)))
    return made


def main() -> None:
    """Prints `(segments, bytes of a row): Blocks(...),` for one and for two segments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a batch; 16 heads of them fill an H100")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is at hand, and block sizes are timed on one")
    dtype = getattr(torch, options.dtype)
    timed = shapes(options.lengths, options.tokens, options.heads, options.head_dim, dtype, "cuda")
    print(f"# plan.CONFIGS[{architecture(torch.cuda.get_device_capability())}]")
    for segments in (1, 2):
        blocks = tune(timed, segments, list(candidates()), print)
        print(f"({segments}, {row_class(timed[0][0])}): {blocks},")


if __name__ == "__main__":
    main()
