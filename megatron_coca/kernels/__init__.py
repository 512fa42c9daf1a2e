"""Triton kernels: operand preparation and flash attention with distance bands and bias formulas.

The modules here import torch and triton and nothing of this package; importing this file alone imports neither.
"""

from importlib.util import find_spec


def missing_triton(device_type: str) -> str | None:
    """None, or why Triton kernels cannot run on "cpu" or "cuda" here."""
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    import triton

    if not hasattr(triton, "knobs"):
        return f"triton {triton.__version__} is older than the kernels need (pip install 'triton>=3.5')"
    if device_type == "cuda":
        return None
    if device_type == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"Triton has no compiler for {device_type}; its interpreter, for tests on the CPU, is not switched on"
