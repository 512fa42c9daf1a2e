"""How long OpenMP threads spin at a barrier before they sleep."""

import os
from collections.abc import MutableMapping

SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""The variables of libgomp, PyTorch's OpenMP library on Linux. It reads them when it is loaded."""
SPIN_COUNT = "10000"


def limit_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let OpenMP threads sleep sooner, unless the user set one of `SETTINGS`. Call it before PyTorch is imported."""
    if not any(environment.get(name) for name in SETTINGS):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
