"""PyTorch's pickles, read without running anything in them.

A file of PyTorch 1.6 or newer is an archive, which is mapped into memory: only what is used is read. Older ones have to
be read whole.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError, pointer
from megatron_coca.checkpoints.weights import DTYPES, WeightEntry, Weights

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


FLOATING = frozenset({*DTYPES.values(), torch.float64})


def names_in_pickle(path: Path) -> list[str]:
    """The names of the weights in one file. Raises CheckpointError."""
    return list(_header(path))


def open_pickles(files: Mapping[str, Path], source: Path) -> Weights:
    """The weights in `.bin` files, from which file holds each one; the way of `open_safetensors`.

    Raises:
        CheckpointError: a file is damaged or holds more than tensors, a weight is not in its file, or is no
            floating-point tensor.
    """
    entries: dict[str, WeightEntry] = {}
    for path in dict.fromkeys(files.values()):
        header = _header(path)
        for name in (name for name, place in files.items() if place == path):
            if name not in header:
                raise CheckpointError(f"{path}: has no weight {name}, which the index of {source} looks for there")
            entries[name] = _entry(name, header[name], path)
    return Weights({name: entries[name] for name in files}, _Reader(files).read, source)


def _entry(name: str, tensor: Tensor, path: Path) -> WeightEntry:
    if tensor.dtype not in FLOATING or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{path}: {name} is stored as {tensor.layout} of {tensor.dtype}; read are plain tensors of "
            f"{', '.join(sorted(map(str, FLOATING)))}"
        )
    return WeightEntry(tensor.dtype, tuple(tensor.shape))


class _Reader:
    """Reads one weight after another."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._whole: tuple[Path | None, Mapping[str, Tensor]] = (None, {})

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        return (_load(path) if is_archive(path) else self._read_whole(path))[name].detach()

    def _read_whole(self, path: Path) -> Mapping[str, Tensor]:
        if self._whole[0] != path:
            self._whole = (None, {})  # before the next one is read, so that no two are in memory
            self._whole = (path, _load(path))
        return self._whole[1]


def _header(path: Path) -> Mapping[str, Tensor]:
    """The weights of a file, of which nothing but dtypes and shapes is looked at."""
    return _load(path, "cpu" if is_archive(path) else "meta")


def _load(path: Path, device: str = "cpu") -> Mapping[str, Tensor]:
    content = load(path, device=device)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__}; read are tensors by their names only")
        if value.is_meta and device != "meta":
            raise CheckpointError(
                f"{path}: {name} has no values: it was saved on the device meta; save the model again"
            )
    return content


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
