"""torch.compile for training, block by block."""

import torch.nn as nn

from megatron_coca.attention.inputs import BackendError


def missing_compiler(device_type: str) -> str | None:
    """None, or why torch.compile cannot make kernels for "cpu" or "cuda" here."""
    # Not at the top: the compiler takes seconds to import, and few runs want it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found (install g++, or set CXX to one)"
    return "Triton cannot be used here (pip install triton)" if device_type == "cuda" and not has_triton() else None


def compile_blocks(blocks: nn.ModuleList, device_type: str) -> None:
    """Compile the call of every block, in place: names of parameters stay. The blocks are alike, so all of them use
    what is compiled for the first.

    Raises:
        BackendError: there is no compiler.
    """
    reason = missing_compiler(device_type)
    if reason is not None:
        raise BackendError(f"torch_compile: {reason}; or set torch_compile=false")
    for block in blocks:
        block.compile()
