"""What the pickles that DeepSpeed writes hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError

_ARRAY, _NUMBER = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
RANDOM_STATE: tuple[Any, ...] = (
    # NumPy 2 has other names for the two functions that make an array and a number from bytes.
    *((_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_NUMBER, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.ndarray, np.dtype),
    *(type(np.dtype(name)) for name in ("uint32", "int64", "float32", "float64")),
)
"""What is in a file of a rank besides tensors and plain containers: NumPy's random state, and numbers of the schedule."""


def tensors(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights in a mapping. Raises a CheckpointError that names what is none."""
    wrong = [name for name, value in content.items() if not isinstance(value, Tensor) or not value.is_floating_point()]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} is no tensor of floating-point numbers")
    return dict(content)
