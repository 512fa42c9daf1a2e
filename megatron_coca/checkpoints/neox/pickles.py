"""The pickles that DeepSpeed writes, read without running anything in them.

Files are mapped into memory, so that only what is used is read.
"""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
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


def load(path: Path, allowed: tuple[Any, ...] = ()) -> dict[str, Any]:
    """The mapping in a pickled file, its tensors mapped into memory.

    Raises:
        CheckpointError: it cannot be read, or names code other than PyTorch's tensors and what is `allowed`; none of
            it has run then.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle fails in any way
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = (
            f"names {named.group(1)}, which is no weights; it was not run" if named else "cannot be read; it is damaged"
        )
        raise CheckpointError(f"{path}: {reason}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no mapping of names to weights")
    return content


def tensors(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """The weights in a mapping. Raises a CheckpointError that names what is none."""
    wrong = [name for name, value in content.items() if not isinstance(value, Tensor) or not value.is_floating_point()]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} is no tensor of floating-point numbers")
    return dict(content)
