"""Compile the Triton kernels for GPUs that this machine need not have, and compare the machine code with its budget.

    PYTHONPATH=. .venv/bin/python tests/golden/kernel_budgets.py --write

The host's code is called on CPU tensors. Each launch is replaced by a compilation. Without `--write`, the script checks
the given compute capabilities, as tests/golden/test_kernel_budgets.py does. The figures are valid for the minor version
of Triton that the file names, and the rules (`broken_rules`) for every version.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from megatron_coca.kernels import attention, launch_constants, operands, polar_operands

ROOT = Path(__file__).parents[2]
BUDGETS = ROOT / "benchmarks/kernels/budgets.json"
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LENGTH = 4096
REGISTERS = 65536
"""32-bit registers of an SM; a warp takes them 256 at a time."""
WARPS = 64
SHARED = {80: 164, 90: 228, 100: 228}
"""KiB of shared memory of an SM; a block gets at most 1 KiB less, which each block takes besides its own."""
SMALLEST = 99
"""KiB that a block gets on GPUs of compute capability 8.6, 8.9 and 12.0, which take the launches of 8.0."""
PTX = {
    "mma": r"mma\.sync\.",
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma\.",
    "cp_async": r"cp\.async\.c[ag]\.",
    "tma": r"cp\.async\.bulk\.tensor",
    "instructions": r"(?m);$",
}
"""Instructions counted: products of three generations, two kinds of asynchronous copies to shared memory, and all."""


@dataclass(frozen=True)
class Figures:
    """Of a compiled kernel: registers of a thread, bytes of stack (which spilled registers need), bytes of shared
    memory, blocks that fit an SM at a time, and instructions of PTX.
    """

    registers: int
    stack: int
    shared: int
    blocks_per_sm: int
    mma: int
    wgmma: int
    tcgen05: int
    cp_async: int
    tma: int
    instructions: int


GROWING = ("registers", "shared", "instructions")


@dataclass(frozen=True)
class Case:
    """One call of the attention kernels, forward and backward."""

    head_dim: int
    two: bool = False
    formula: str | None = None
    documents: bool = False
    first_keys: int | None = None
    dtype: str = "bfloat16"
    magnitudes: bool = False

    def __str__(self) -> str:
        told = [self.dtype, f"d{self.head_dim}", "two segments" * self.two, self.formula or ""]
        told += [
            "magnitudes" * self.magnitudes,
            "documents" * self.documents,
            f"first {self.first_keys}" if self.first_keys else "",
        ]
        return " ".join(filter(None, told))

    def call(self, capability: int) -> None:
        """With grouped heads and the launches of the table, which tensors on the CPU would not take."""
        attention.blocks_for = partial(launch_constants.launches, capability)
        dtype = getattr(torch, self.dtype)
        query, key = (torch.zeros(2, n, LENGTH, self.head_dim, dtype=dtype, requires_grad=True) for n in (4, 2))
        learned = self.formula in ("log", "power")
        attention.flash_attention(
            query,
            key,
            key,
            0.125,
            far_query=query if self.two else None,
            far_key=key if self.two else None,
            window=256 if self.two else None,
            first_keys=self.first_keys,
            formula=self.formula,
            coefficients=torch.ones(4, 2, requires_grad=learned) if self.formula else None,
            starts=torch.zeros(2, LENGTH, dtype=torch.int64) if self.documents else None,
            tables=[torch.zeros(LENGTH, self.head_dim)] * 4 if self.magnitudes else (),
            offset=torch.zeros(4, self.head_dim, requires_grad=True) if self.magnitudes else None,
        ).sum().backward()


MAGNITUDES = [
    Case(head_dim, magnitudes=True, documents=documents) for head_dim in (64, 128) for documents in (False, True)
]
"""Must not spill registers."""
RULED = [
    case
    for head_dim in (64, 128)
    for case in (
        Case(head_dim),
        Case(head_dim, formula="power", documents=True),
        Case(head_dim, two=True),
        Case(head_dim, two=True, documents=True, first_keys=10),
    )
]
"""What the rules hold for. With one segment and with two, the plainest kernels and those that need the most registers:
no configuration has two segments and a bias.
"""
OPERANDS = (("coca", 64, 64, 1), ("coca", 64, 64, 2), ("coca_strict", 32, 128, 1), ("rotary", 64, 64, 1))
"""Forms of operands, rotated features of the head's, and segments."""
POLAR = (
    (polar_operands.Terms("softplus", 1, 1), 64, 64, 2),
    (polar_operands.Terms("softplus", 1, 1), 128, 128, 1),
    (polar_operands.Terms("relu_mean", 2, 2), 32, 128, 1),
)
"""Polar forms of operands with constant angles, rotated features of the head's, and segments. Must not spill."""
OTHERS = [
    *(Case(256, two=two) for two in (False, True)),
    *(Case(head_dim, dtype="float32") for head_dim in (64, 256)),
    Case(80, formula="log"),
    Case(64, dtype="float32", magnitudes=True),
]


class AbsentGpu:
    """A driver that only says which GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        """One number for each GPU: Triton keeps what it has compiled by it."""
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def measure(compiled: Any, capability: int) -> Figures:
    """The figures of a kernel that Triton has compiled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    of_a_warp = -(-registers * 32 // 256) * 256
    blocks = min(REGISTERS // of_a_warp // warps, SHARED[capability] * 1024 // (shared + 1024), WARPS // warps)
    counts = {name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in PTX.items()}
    return Figures(registers, stack, shared, blocks, **counts)


def compile_all(capability: int) -> Iterator[tuple[str, Figures, str]]:
    """(what was compiled, its figures, the rules that hold for it: all, spills or none)."""
    triton.runtime.driver.set_active(AbsentGpu(capability))
    compiled: list[tuple[str, Figures]] = []

    def compile_instead(kernel: Any, grid: Any) -> Callable[..., None]:
        def compiling(*args: Any, **kwargs: Any) -> None:
            result = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            name = kernel.fn.__name__.strip("_") + " beyond the window" * kwargs.get("BEYOND", False)
            compiled.append((name, measure(result, capability)))

        return compiling

    JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign]
    for case in [*RULED, *MAGNITUDES, *OTHERS]:
        case.call(capability)
        for kernel, figures in compiled:
            rules = "none" if kernel == "delta" or case in OTHERS else "spills" if case in MAGNITUDES else "all"
            yield f"{kernel} {case}", figures, rules
        compiled.clear()
    for form, rotated, head_dim, segments in OPERANDS:
        _operands(form, rotated, head_dim, segments)
        for kernel, figures in compiled:
            yield f"{kernel} {form} {rotated} of {head_dim}{' two segments' * (segments - 1)}", figures, "none"
        compiled.clear()
    for terms, rotated, head_dim, segments in POLAR:
        _polar(terms, rotated, head_dim, segments)
        for kernel, figures in compiled:
            name = f"{kernel} {terms.magnitude} {rotated} of {head_dim}{' two segments' * (segments - 1)}"
            yield name, figures, "spills"
        compiled.clear()


def _operands(form: Any, rotated: int, head_dim: int, segments: int) -> None:
    """Both kernels on views into a packed projection."""
    q, k = _projected(head_dim)
    tables = [torch.zeros(LENGTH, rotated // 2)] * (4 * segments)
    sum(x.sum() for x in operands.fused_operands(q, k, tables, form)).backward()  # type: ignore[union-attr]


def _polar(terms: polar_operands.Terms, rotated: int, head_dim: int, segments: int) -> None:
    q, k = _projected(head_dim)
    tables = [torch.zeros(LENGTH, rotated // terms.features)] * (4 * segments)
    count = rotated // 2 if (terms.magnitude, terms.features) == ("relu_mean", 2) else rotated
    offset = torch.zeros(4, count, requires_grad=True)
    sum(x.sum() for x in polar_operands.polar_operands(q, k, tables, terms, offset)).backward()  # type: ignore[union-attr]


def _projected(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.zeros(2, LENGTH, 4, 3 * head_dim, dtype=torch.bfloat16, requires_grad=True)
    q, k, _ = packed.transpose(1, 2).chunk(3, dim=-1)
    return q, k


def broken_rules(figures: Figures, capability: int, ruled: str) -> list[str]:
    """What no kernel may do, and what attention at head_dim 64 and 128 must."""
    largest = SMALLEST if capability == 80 else SHARED[capability] - 1
    rules = {f"more than {largest} KiB of shared memory": figures.shared > largest * 1024}
    if ruled != "none":
        rules["spills registers"] = figures.stack > 0
    if ruled == "all":
        rules |= {
            "no asynchronous copy": figures.cp_async + figures.tma == 0,
            "no wgmma": capability == 90 and figures.wgmma == 0,
            "no product on tensor cores": figures.mma + figures.wgmma + figures.tcgen05 == 0,
        }
    return [rule for rule, broken in rules.items() if broken]


def complaints(capability: int, recorded: dict[str, Any], tell: Callable[[str], None]) -> list[str]:
    """One line per broken rule or exceeded budget; a kernel that the file does not have yet must keep the rules."""
    same_version = _minor(recorded["triton"]) == _minor(triton.__version__)
    budgets = recorded["kernels"].get(str(capability), {})
    found = []
    for name, figures, ruled in compile_all(capability):
        tell(f"sm_{capability} {name}: {figures}")
        found += [f"sm_{capability} {name}: {rule}" for rule in broken_rules(figures, capability, ruled)]
        budget = budgets.get(name, {}) if same_version else {}
        found += [
            f"sm_{capability} {name}: {getattr(figures, field)} {field}, budget {budget[field]}"
            for field in GROWING
            if getattr(figures, field) > budget.get(field, math.inf)
        ]
    return found


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def write(capabilities: list[int]) -> None:
    """Replaces the figures of these capabilities in the file; a kernel is a line."""
    kernels = json.loads(BUDGETS.read_text())["kernels"] if BUDGETS.exists() else {}
    for capability in capabilities:
        kernels[str(capability)] = {name: asdict(figures) for name, figures, _ in compile_all(capability)}
    tables = [
        f'"{capability}": {{\n'
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in table.items())
        + "\n}"
        for capability, table in kernels.items()
    ]
    BUDGETS.parent.mkdir(exist_ok=True)
    BUDGETS.write_text(f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(tables) + "\n}}\n")


def main() -> None:
    """Exit status 1, and the complaints on stderr, where a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", nargs="*", type=int, default=[*SHARED], help="80, 90, 100")
    parser.add_argument("--write", action="store_true", help="record what is measured as the budget")
    options = parser.parse_args()
    if options.write:
        write(options.capabilities)
        return
    found = [
        line
        for capability in options.capabilities
        for line in complaints(capability, json.loads(BUDGETS.read_text()), lambda line: print(line, flush=True))
    ]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
