"""Named weights, the common form of all layouts on disk, and their two file formats, safetensors and pickle.

Only one weight is in memory at a time, because a model of 7 billion parameters takes 13 GB in half precision.
"""

import json
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError
from megatron_coca.support.console import Progress
from megatron_coca.support.regular_files import open_regular

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Supported dtypes by their configuration names."""

_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMED = {code: dtype for dtype, code in _CODES.items()}


class WeightEntry(NamedTuple):
    """Dtype and shape of a weight, available before the weight is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def stand_in(self) -> Tensor:
        """Return a meta tensor of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Weights:
    """Weights that are read on demand.

    Attributes:
        entries: name -> dtype and shape, in the fastest order for reading.
        read: a function that returns the named weight on the CPU, with the dtype and shape of its entry.
        source: the file or folder, for messages.
        origins: our name -> the name in `source` if they differ, for messages.
        remedy: the remedy in messages if the weights do not fit a model.
    """

    entries: Mapping[str, WeightEntry]
    read: Callable[[str], Tensor]
    source: Path
    origins: Mapping[str, str] = field(default_factory=dict)
    remedy: str = "correct the configuration, or use other weights"

    def origin(self, name: str) -> str:
        """Return the name of a weight in `source`."""
        return self.origins.get(name, name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight) pairs. Each weight is read just before it is yielded."""
        return ((name, self.read(name)) for name in self.entries)

    @contextmanager
    def shown(self, title: str, show: bool = True) -> Iterator["Weights"]:
        """Yield the same weights, with a progress bar while they are read. Then warn of values that are not finite."""
        total, broken = sum(entry.nbytes for entry in self.entries.values()), set[str]()
        with Progress(title, total, "B", show=show) as progress:

            def read(name: str) -> Tensor:
                values = self.read(name)
                progress.advance(self.entries[name].nbytes)
                if values.numel() and not all(math.isfinite(end) for end in torch.aminmax(values)):
                    broken.add(name)
                return values

            yield replace(self, read=read)
        if broken:
            logger.warning(
                "%s: %d of %d weights contain NaN or infinite values, for example %s; the run diverged, or the file is "
                "damaged",
                *(self.source, len(broken), len(self.entries), self.origin(min(broken))),
            )

    def to(self, dtype: torch.dtype) -> "Weights":
        """Return the same weights, rounded to `dtype` when they are read.

        The `correction_bias` of routers keeps its dtype, because models keep it too. Reading a weight raises
        CheckpointError if rounding makes a finite value infinite.
        """
        rounded = {name: entry for name, entry in self.entries.items() if not name.endswith(".router.correction_bias")}

        def read(name: str) -> Tensor:
            exact = self.read(name)
            if name not in rounded:
                return exact
            converted = exact.to(dtype)
            _check_overflow(exact, converted, f"{self.source}: {self.origin(name)}")
            return converted

        entries = dict(self.entries) | {name: entry._replace(dtype=dtype) for name, entry in rounded.items()}
        return replace(self, entries=entries, read=read)

    def only(self, names: Iterable[str]) -> "Weights":
        """Return only the named weights, in the given order."""
        return replace(self, entries={name: self.entries[name] for name in names})

    def adding(self, tensors: Mapping[str, Tensor]) -> "Weights":
        """Return these weights and then `tensors`."""
        added = {name: WeightEntry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        read = self.read
        return replace(
            self,
            entries={**self.entries, **added},
            read=lambda name: tensors[name] if name in tensors else read(name),
        )


def _check_overflow(exact: Tensor, rounded: Tensor, name: str) -> None:
    end = torch.finfo(rounded.dtype).max
    if end >= torch.finfo(exact.dtype).max or not exact.numel():
        return
    low, high = exact.aminmax()
    if -end <= low and high <= end:  # the usual case, which needs no memory for the comparison below
        return
    if not bool((rounded.isinf() & exact.isfinite()).any()):
        return
    largest = float(exact[exact.isfinite()].abs().max())
    wider = [name for name, dtype in DTYPES.items() if torch.finfo(dtype).max >= largest]
    raise CheckpointError(
        f"{name}: has values up to {largest:.6g}, above the maximum {end:g} of "
        f"{str(rounded.dtype).removeprefix('torch.')}; use {' or '.join(wider) or 'smaller values'}"
    )


def open_safetensors(
    files: Mapping[str, Path], source: Path, also: Mapping[str, torch.dtype] = MappingProxyType({})
) -> Weights:
    """Open the weights in safetensors files; `files` maps each weight to its file. Headers are read immediately.

    Floating-point numbers of 16 bits or more can be read. `also` maps the codes of further dtypes in the files to them.

    Raises CheckpointError if a file is missing or damaged, or if a weight is not in its file or not floating-point.
    """
    entries: dict[str, WeightEntry] = {}
    dtypes = {**_NAMED, **also}
    for path in dict.fromkeys(files.values()):
        with _opened(path) as file:
            present = set(file.keys())
            for name in (name for name, other in files.items() if other == path):
                if name not in present:
                    raise CheckpointError(
                        f"{path}: has no weight {name}, but the index of {source} lists it; download the folder again"
                    )
                header = file.get_slice(name)
                code = header.get_dtype()
                if code not in dtypes:
                    raise CheckpointError(
                        f"{path}: {name} has dtype {code}, which is not supported; convert it to one of "
                        f"{', '.join(_NAMED)}"
                    )
                entries[name] = WeightEntry(dtypes[code], tuple(header.get_shape()))

    def read(name: str) -> Tensor:
        with _opened(files[name]) as file:
            return file.get_tensor(name)

    return Weights({name: entries[name] for name in files}, read, source)


def open_safetensors_file(path: Path, source: Path) -> Weights:
    """Open all weights in one safetensors file; `source` appears in messages. Raises CheckpointError."""
    return open_safetensors(dict.fromkeys(names_in(path), path), source)


class StoredTensor(NamedTuple):
    """Header entry of a tensor in a safetensors file: dtype code, shape, offset in the file, and size in bytes."""

    code: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_layout(path: Path) -> dict[str, StoredTensor]:
    """Return the header entry of every tensor in a safetensors file. Raises CheckpointError."""
    _opened(path)  # the library checks the header
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return found


def names_in(path: Path) -> list[str]:
    """Return the names of the weights in one safetensors file. Raises CheckpointError."""
    with _opened(path) as file:
        return list(file.keys())


def _opened(path: Path) -> safe_open:
    try:
        open_regular(path).close()
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}); download it again") from error


def write_safetensors(
    path: Path, weights: Weights, metadata: Mapping[str, str] | None = None, digest: Any = None
) -> None:
    """Write weights to one file as they are read. The library's own writer needs all weights in memory.

    Args:
        digest: a hashlib object, which is updated with all written bytes.

    The file consists of the length of a JSON header, the header, and all values (huggingface/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in weights.entries.items():
        offsets = [end, end + entry.nbytes]
        header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align values to 8 bytes
    with path.open("wb") as file:

        def write(data: Any) -> None:
            file.write(data)
            if digest is not None:
                digest.update(data)

        write(len(text).to_bytes(8, "little") + text)
        for name, entry in weights.entries.items():
            values = weights.read(name)
            assert (values.dtype, tuple(values.shape)) == entry, f"{name}: {values.dtype} {values.shape}, not {entry}"
            write(values.contiguous().flatten().view(torch.uint8).numpy())


# Pickled files --------------------------------------------------------------------------------------------------------

# No code in pickled files is run. Files from PyTorch 1.6 or newer are zip archives, which are memory-mapped, so that
# only the tensors in use are read. Older files are read completely.

ZIP_MAGIC = b"PK\x03\x04"

_CODE = re.compile(r"GLOBAL (\S+)")
_ONLY_TENSORS = "no code in the file was run; if you trust its author, convert the file to safetensors"

_ARRAY, _NUMBER = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
RANDOM_STATE: tuple[Any, ...] = (
    # NumPy 2 renamed the two functions that build an array and a number from bytes.
    *((_ARRAY, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_NUMBER, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.ndarray, np.dtype),
    *(type(np.dtype(name)) for name in ("uint32", "int64", "float32", "float64")),
)
"""Types in GPT-NeoX's rank files besides tensors and plain containers: NumPy random states and numbers."""


def is_archive(path: Path) -> bool:
    """Return whether a file is a zip archive, which can be memory-mapped. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the disk and the permissions"
        ) from error


def load_pickle(path: Path, allowed: Sequence[Any] = (), device: str = "cpu") -> dict[Any, Any]:
    """Load the mapping in a pickled file, with its tensors on `device`. No code in the file is run.

    Raises CheckpointError if the file is damaged, is not a mapping, or refers to types other than PyTorch's tensor
    types and `allowed`.
    """
    archive = is_archive(path)
    mapped = device == "cpu" and archive
    try:
        if archive:
            _check_stored(path)
        with torch.serialization.safe_globals(list(allowed)):
            content = torch.load(path, map_location=device, weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises errors of many types for a damaged file
        if not isinstance(error, pickle.UnpicklingError):
            raise CheckpointError(
                f"{path}: damaged or not a weights file ({type(error).__name__}: {error}); download it again"
            ) from error
        code = _CODE.search(str(error))
        reason = f"contains objects other than tensors ({code[1]})" if code else "a pickle without weights"
        raise CheckpointError(f"{path}: {reason}; {_ONLY_TENSORS}") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: contains a {type(content).__name__}, not a mapping of names to tensors; copy the file again"
        )
    return content


def _check_stored(path: Path) -> None:
    """Raise CheckpointError for an archive with compressed members, whose contents may be much larger than the file.
    PyTorch would read these contents into memory. It never writes such archives itself.
    """
    with zipfile.ZipFile(path) as archive:
        compressed = next((entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED), None)
    if compressed is not None:
        raise CheckpointError(
            f"{path}: {compressed.filename} is compressed ({compressed.file_size:,} bytes), which PyTorch never does; "
            "save the file again with torch.save"
        )


def names_in_pickle(path: Path) -> list[str]:
    """Return the names of the weights in one pickled file. Raises CheckpointError."""
    return list(_header(path))


def open_pickles(files: Mapping[str, Path], source: Path) -> Weights:
    """Open the weights in `.bin` files; the counterpart of `open_safetensors`.

    Raises CheckpointError if a file is damaged or contains other objects than tensors, or if a weight is not in its
    file or is not a floating-point tensor.
    """
    entries: dict[str, WeightEntry] = {}
    for path in dict.fromkeys(files.values()):
        header = _header(path)
        for name in (name for name, file in files.items() if file == path):
            if name not in header:
                raise CheckpointError(
                    f"{path}: has no weight {name}, but the index of {source} lists it; download the folder again"
                )
            tensor = header[name]
            if tensor.dtype not in _CODES or tensor.layout is not torch.strided or tensor.is_nested:
                layout = "nested tensors" if tensor.is_nested else tensor.layout
                raise CheckpointError(
                    f"{path}: {name} has {layout} and {tensor.dtype}, which is not supported; convert it to a "
                    f"dense tensor of {', '.join(sorted(map(str, _CODES)))}"
                )
            entries[name] = WeightEntry(tensor.dtype, tuple(tensor.shape))
    whole: dict[Path, dict[str, Tensor]] = {}  # the file of the older format that was read last stays in memory

    def read(name: str) -> Tensor:
        path = files[name]
        if is_archive(path):
            return _load(path)[name].detach()
        if path not in whole:
            whole.clear()  # before the next file is read, so that only one is in memory
            whole[path] = _load(path)
        return whole[path][name].detach()

    return Weights({name: entries[name] for name in files}, read, source)


def _header(path: Path) -> dict[str, Tensor]:
    """Load a file only for the dtypes and shapes of its weights."""
    return _load(path, "cpu" if is_archive(path) else "meta")


def _load(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    content = load_pickle(path, device=device)
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}, but only named tensors are supported; save a state dict"
            )
        if value.is_meta and device != "meta":
            raise CheckpointError(
                f"{path}: {name} has no values, because it was saved on the meta device; save the model again"
            )
    return content
