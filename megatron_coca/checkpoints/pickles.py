"""Read PyTorch's pickled files without running anything in them.

A file of PyTorch 1.6 or newer is a zip archive, which is mapped into memory: only what is used is read. Older files
have to be read whole.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, pointer
from megatron_coca.checkpoints.weights import DTYPES, WeightEntry, Weights

ZIP_MAGIC = b"PK\x03\x04"
FLOATING = frozenset({*DTYPES.values(), torch.float64})

_REFUSED = re.compile(r"GLOBAL (\S+)")
_ONLY_TENSORS = (
    "Only tensors are read, and nothing in it was run; where you trust its author, have it saved as safetensors"
)

_ARRAY, _NUMBER = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
RANDOM_STATE: tuple[Any, ...] = (
    # NumPy 2 has other names for the two functions that make an array and a number from bytes.
    *((_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_NUMBER, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.ndarray, np.dtype),
    *(type(np.dtype(name)) for name in ("uint32", "int64", "float32", "float64")),
)
"""Types in GPT-NeoX's rank files besides tensors and plain containers: NumPy's random state, and scheduler numbers."""


def is_archive(path: Path) -> bool:
    """Return whether one weight can be read from the file without the others. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def load(path: Path, allowed: Sequence[Any] = (), device: str = "cpu") -> dict[Any, Any]:
    """Load the mapping in a pickled file, with its tensors on `device`.

    Raises:
        CheckpointError: the file is damaged, holds no mapping, or names code other than PyTorch's tensors and what is
            `allowed`; none of it has run then.
    """
    mapped = device == "cpu" and is_archive(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:  # the library raises errors of many types for a damaged file
        if reason := pointer(path):
            raise CheckpointError(f"{path}: {reason}") from error
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path}: is damaged or not a weights file ({type(error).__name__} {error}); fetch it again"
            ) from error
        refused = _REFUSED.search(str(error))
        reason = f"holds more than tensors ({refused[1]})" if refused else "is a pickle of something else than weights"
        raise CheckpointError(f"{path}: {reason}. {_ONLY_TENSORS}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a mapping of names to tensors")
    return content


def tensors(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights in a mapping. Raises a CheckpointError that names a value that is no weight."""
    wrong = [name for name, value in content.items() if not isinstance(value, Tensor) or not value.is_floating_point()]
    if wrong:
        raise CheckpointError(f"{path}: {wrong[0]} is not a floating-point tensor")
    return dict(content)


def names_in_pickle(path: Path) -> list[str]:
    """Return the names of the weights in one file. Raises CheckpointError."""
    return list(_header(path))


def open_pickles(files: Mapping[str, Path], source: Path) -> Weights:
    """Open the weights in `.bin` files, given the file of each; the counterpart of `open_safetensors`.

    Raises:
        CheckpointError: a file is damaged or holds more than tensors, a weight is not in its file, or is no
            floating-point tensor.
    """
    entries: dict[str, WeightEntry] = {}
    for path in dict.fromkeys(files.values()):
        header = _header(path)
        for name in (name for name, file in files.items() if file == path):
            if name not in header:
                raise CheckpointError(f"{path}: has no weight {name}, although the index of {source} lists it there")
            tensor = header[name]
            if tensor.dtype not in FLOATING or tensor.layout is not torch.strided:
                raise CheckpointError(
                    f"{path}: {name} is stored as {tensor.layout} of {tensor.dtype}; supported are dense tensors of "
                    f"{', '.join(sorted(map(str, FLOATING)))}"
                )
            entries[name] = WeightEntry(tensor.dtype, tuple(tensor.shape))
    whole: dict[Path, dict[str, Tensor]] = {}  # the one old-format file in memory

    def read(name: str) -> Tensor:
        path = files[name]
        if is_archive(path):
            return _load(path)[name].detach()
        if path not in whole:
            whole.clear()  # before the next file is read, so that no two are in memory
            whole[path] = _load(path)
        return whole[path][name].detach()

    return Weights({name: entries[name] for name in files}, read, source)


def _header(path: Path) -> dict[str, Tensor]:
    """Load the weights of a file for their dtypes and shapes alone."""
    return _load(path, "cpu" if is_archive(path) else "meta")


def _load(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    content = load(path, device=device)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name!r} is a {type(value).__name__}; only tensors by name are supported")
        if value.is_meta and device != "meta":
            raise CheckpointError(
                f"{path}: {name} has no values: it was saved on the device meta; save the model again"
            )
    return content
