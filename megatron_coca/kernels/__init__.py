"""Triton kernels: operand preparation and flash attention with distance bands and bias formulas.

The modules here import torch and triton, but nothing from the rest of `megatron_coca`. This file loads neither torch
nor triton when it is imported.
"""

from importlib.util import find_spec


def missing_triton(device_type: str) -> str | None:
    """Return None, or the reason why Triton kernels cannot run here on `device_type` ("cpu" or "cuda")."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    import triton

    if not hasattr(triton, "knobs"):
        return f"triton {triton.__version__} is too old (pip install 'triton>=3.5')"
    if device_type == "cuda":
        return None
    if device_type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"Triton has no compiler for {device_type}, and its interpreter (for tests on the CPU) is off"
