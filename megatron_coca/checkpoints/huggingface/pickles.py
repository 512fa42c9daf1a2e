"""Weights in PyTorch's `.bin` files: of archives one weight is mapped into memory, of older files one is held whole."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.pickles import is_archive, load
from megatron_coca.checkpoints.weights import DTYPES, Entry, Weights

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
    entries: dict[str, Entry] = {}
    for path in dict.fromkeys(files.values()):
        header = _header(path)
        for name in (name for name, place in files.items() if place == path):
            if name not in header:
                raise CheckpointError(f"{path}: has no weight {name}, which the index of {source} looks for there")
            entries[name] = _entry(name, header[name], path)
    return Weights({name: entries[name] for name in files}, _Reader(files).read, source)


def _entry(name: str, tensor: Tensor, path: Path) -> Entry:
    if tensor.dtype not in FLOATING or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{path}: {name} is stored as {tensor.layout} of {tensor.dtype}; read are plain tensors of "
            f"{', '.join(sorted(map(str, FLOATING)))}"
        )
    return Entry(tensor.dtype, tuple(tensor.shape))


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
