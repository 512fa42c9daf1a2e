"""How the C library treats memory that tensors give back on the CPU."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
LARGEST_THRESHOLD = 32 << 20
"""glibc takes no larger M_MMAP_THRESHOLD on 64-bit machines."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next step instead of returning them to the kernel.

    Returned pages come back zeroed, one fault each: on small models that is a tenth to a fifth of a training step
    (docs/training.md). Peak memory stays the same. Returns whether the C library has these settings.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = {M_MMAP_THRESHOLD: LARGEST_THRESHOLD, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
    return all([library.mallopt(name, value) for name, value in settings.items()])
