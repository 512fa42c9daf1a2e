"""Compiles every kernel for an NVIDIA GPU that need not be there: python compile_kernels.py <compute capability>

Calls on CPU tensors run the host's code as it is; in place of each launch the kernel is compiled. Prints a line per
kernel with its registers' spills and its shared memory.
"""

import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_coca.kernels import operands, plan
from megatron_coca.kernels.attention import flash_attention

LENGTH = 4096
BITS_OF_A_WARP = 32
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class AbsentGpu:
    """A driver that only says which GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, BITS_OF_A_WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_instead(kernel: Any, grid: Any) -> Any:
    """In place of `kernel[grid]`: compiles and prints what the machine code needs."""

    def compiled(*args: Any, **kwargs: Any) -> None:
        result = kernel.run(*args, grid=grid, warmup=True, **kwargs)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(result.asm["cubin"])
            file.flush()
            usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        words = [word for word in usage.stdout.split() if word.startswith(("REG", "STACK"))]
        print("cubin", kernel.fn.__name__, f"shared {result.metadata.shared}", *words, flush=True)

    return compiled


def attention(dtype: torch.dtype, head_dim: int, two: bool, formula: str | None, documents: bool) -> None:
    """All kernels of one call forward and backward, with grouped heads."""
    print(f"attention {dtype} {head_dim} two={two} {formula} documents={documents}", flush=True)
    query, key = (torch.zeros(2, heads, LENGTH, head_dim, dtype=dtype, requires_grad=True) for heads in (4, 2))
    flash_attention(
        query,
        key,
        key,
        0.125,
        far_query=query if two else None,
        far_key=key if two else None,
        window=256 if two else None,
        first_keys=10 if two and documents else None,
        formula=formula,
        coefficients=torch.ones(4, 2, requires_grad=True) if formula else None,
        starts=torch.zeros(2, LENGTH, dtype=torch.int64) if documents else None,
        blocks=plan.CONFIGS[1 + two, plan.row_class(query)],
    ).sum().backward()


def operand_kernels(dtype: torch.dtype, rotated: int, head_dim: int, form: Any) -> None:
    """Both kernels on views into a packed projection."""
    print(f"operands {dtype} {rotated} of {head_dim} {form}", flush=True)
    packed = torch.zeros(2, LENGTH, 4, 3 * head_dim, dtype=dtype, requires_grad=True)
    q, k, _ = packed.transpose(1, 2).chunk(3, dim=-1)
    tables = [torch.zeros(LENGTH, rotated // 2)] * 4
    sum(x.sum() for x in operands.fused_operands(q, k, *tables, form)).backward()  # type: ignore[union-attr]


def main() -> None:
    """Every head_dim with one segment and with two, every formula, documents, dtypes and forms."""
    triton.runtime.driver.set_active(AbsentGpu(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign]
    for head_dim, two in product((16, 64, 128), (False, True)):
        attention(torch.bfloat16, head_dim, two, None, False)
    for formula in ("linear", "log", "power"):
        attention(torch.bfloat16, 64, True, formula, True)
    attention(torch.float16, 64, False, "log", False)
    attention(torch.float32, 64, False, None, False)
    attention(torch.bfloat16, 80, False, None, False)
    for form, dtype in product(operands.FORMS, (torch.bfloat16, torch.float32)):
        operand_kernels(dtype, 64, 64, form)
    operand_kernels(torch.bfloat16, 16, 80, "coca")


if __name__ == "__main__":
    main()
