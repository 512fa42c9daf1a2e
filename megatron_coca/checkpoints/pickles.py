"""PyTorch's pickles, read without running anything in them.

A file of PyTorch 1.6 or newer is an archive, which is mapped into memory: only what is used is read. Older ones have to
be read whole.
"""

import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.pointers import pointer

ARCHIVE = b"PK\x03\x04"
"""How an archive begins."""

_REFUSED = re.compile(r"GLOBAL (\S+)")
_ONLY_TENSORS = (
    "Only tensors are read, and nothing in it was run; where you trust its author, have it saved as safetensors"
)


def is_archive(path: Path) -> bool:
    """Whether a weight can be read from the file without the others. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return file.read(len(ARCHIVE)) == ARCHIVE
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def load(path: Path, allowed: Sequence[Any] = (), device: str = "cpu") -> dict[Any, Any]:
    """The mapping in a pickled file, with its tensors on `device`.

    Raises:
        CheckpointError: it is damaged, is no mapping, or names code other than PyTorch's tensors and what is `allowed`;
            none of it has run then.
    """
    mapped = device == "cpu" and is_archive(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        _refuse_pointer(path, error)
        found = _REFUSED.search(str(error))
        told = f"holds more than tensors ({found[1]})" if found else "is a pickle of something else than weights"
        raise CheckpointError(f"{path}: {told}. {_ONLY_TENSORS}") from error
    except Exception as error:  # what the library raises for a damaged file is of many kinds
        _refuse_pointer(path, error)
        raise CheckpointError(
            f"{path}: is damaged, or no file of weights ({type(error).__name__} {error}); fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not tensors by their names")
    return content


def _refuse_pointer(path: Path, error: Exception) -> None:
    told = pointer(path)
    if told is not None:
        raise CheckpointError(f"{path}: {told}") from error
