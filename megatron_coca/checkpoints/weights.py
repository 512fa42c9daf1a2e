"""Weights by name, read one at a time: the common form of every layout on disk.

No more than one weight is in memory: a model of 7 billion parameters takes 13 GB in half precision.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_coca.checkpoints.files import CheckpointError, pointer
from megatron_coca.checkpoints.weight_map import Heads, Row
from megatron_coca.console import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""dtypes for saving and computing."""

_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMED = {code: dtype for dtype, code in _CODES.items()}


class WeightEntry(NamedTuple):
    """dtype and shape of a weight, known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def stand_in(self) -> Tensor:
        """A meta tensor of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Weights:
    """Weights that are read on demand.

    Attributes:
        entries: dtype and shape by name, in the best order for reading.
        read: gives a weight on the CPU, in the dtype and shape of its entry.
        source: the file or folder, for messages.
        origins: names of the weights in `source` where they differ, for messages.
    """

    entries: Mapping[str, WeightEntry]
    read: Callable[[str], Tensor]
    source: Path
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """The name of a weight in `source`."""
        return self.origins.get(name, name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights, each read when it is reached."""
        return ((name, self.read(name)) for name in self.entries)

    @contextmanager
    def shown(self, title: str, show: bool = True) -> Iterator["Weights"]:
        """The same weights, whose progress is shown as they are read."""
        total = sum(entry.nbytes for entry in self.entries.values())
        with Progress(title, total, "B", show=show) as progress:

            def read(name: str) -> Tensor:
                values = self.read(name)
                progress.advance(self.entries[name].nbytes)
                return values

            yield replace(self, read=read)

    def to(self, dtype: torch.dtype) -> "Weights":
        """The same weights rounded to `dtype`; reading raises CheckpointError if a finite value becomes infinite."""

        def read(name: str) -> Tensor:
            exact = self.read(name)
            rounded = exact.to(dtype)
            _refuse_overflow(exact, rounded, f"{self.source}: {self.origin(name)}")
            return rounded

        return replace(self, entries={n: entry._replace(dtype=dtype) for n, entry in self.entries.items()}, read=read)

    def first_rows(self, names: Iterable[str], count: int) -> "Weights":
        """The same weights, with the first `count` rows only of the named ones; a name may be missing."""
        cut = {name for name in names if name in self.entries}
        entries = {
            name: entry._replace(shape=(count, *entry.shape[1:])) if name in cut else entry
            for name, entry in self.entries.items()
        }
        return replace(
            self, entries=entries, read=lambda name: self.read(name)[:count] if name in cut else self.read(name)
        )

    def only(self, names: Iterable[str]) -> "Weights":
        """The named weights, in this order."""
        return replace(self, entries={name: self.entries[name] for name in names})

    def shards(self, limit: int) -> Iterator["Weights"]:
        """The same weights in order, in groups of at most `limit` bytes (or of one larger weight)."""
        names: list[str] = []
        taken = 0
        for name, entry in self.entries.items():
            if names and taken + entry.nbytes > limit:
                yield self.only(names)
                names, taken = [], 0
            names.append(name)
            taken += entry.nbytes
        yield self.only(names)


def _refuse_overflow(exact: Tensor, rounded: Tensor, name: str) -> None:
    end = torch.finfo(rounded.dtype).max
    if end >= torch.finfo(exact.dtype).max or not exact.numel():
        return
    low, high = exact.aminmax()
    if -end <= low and high <= end:  # the usual case, without memory for the comparison below
        return
    if not bool((rounded.isinf() & exact.isfinite()).any()):
        return
    largest = float(exact[exact.isfinite()].abs().max())
    wider = [name for name, dtype in DTYPES.items() if torch.finfo(dtype).max >= largest]
    raise CheckpointError(
        f"{name} has values up to {largest:.6g}, above the maximum {end:g} of "
        f"{str(rounded.dtype).removeprefix('torch.')}; "
        f"use {' or '.join(wider) or 'smaller values'}"
    )


def open_safetensors(files: Mapping[str, Path], source: Path) -> Weights:
    """The weights in safetensors files, by the file that holds each. Headers are read at once.

    Raises CheckpointError if a file is missing or damaged, or a weight is not in its file or not floating-point.
    """
    entries: dict[str, WeightEntry] = {}
    for path in dict.fromkeys(files.values()):
        with _opened(path) as file:
            present = set(file.keys())
            for name in (name for name, other in files.items() if other == path):
                if name not in present:
                    raise CheckpointError(
                        f"{path}: has no weight {name}, although the index of {source} lists it there"
                    )
                header = file.get_slice(name)
                code = header.get_dtype()
                if code not in _NAMED:
                    raise CheckpointError(f"{path}: {name} is stored as {code}; known are {', '.join(_NAMED)}")
                entries[name] = WeightEntry(_NAMED[code], tuple(header.get_shape()))

    def read(name: str) -> Tensor:
        with _opened(files[name]) as file:
            return file.get_tensor(name)

    return Weights({name: entries[name] for name in files}, read, source)


def open_safetensors_file(path: Path, source: Path) -> Weights:
    """All weights in one safetensors file; `source` is named in messages. Raises CheckpointError."""
    return open_safetensors(dict.fromkeys(names_in(path), path), source)


def names_in(path: Path) -> list[str]:
    """Names of the weights in one safetensors file. Raises CheckpointError."""
    with _opened(path) as file:
        return list(file.keys())


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        problem = pointer(path) or f"is not a readable safetensors file ({error}); fetch it again"
        raise CheckpointError(f"{path}: {problem}") from error


def write_safetensors(
    path: Path, weights: Weights, metadata: Mapping[str, str] | None = None, digest: Any = None
) -> None:
    """Write weights to one file as they are read (the library's writer needs all of them in memory).

    Args:
        digest: a hashlib object, updated with all bytes written.

    The format is the length of a JSON header, the header, and all values (huggingface/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, entry in weights.entries.items():
        offsets = [end, end + entry.nbytes]
        header[name] = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns values to 8 bytes
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


def joined(theirs: Weights, rows: Sequence[Row], heads: Heads) -> Weights:
    """Weights under our names from those of another layout, by the rows of its table (weight_map.py).

    Raises CheckpointError if a weight is missing, or the shapes of those that are packed into one do not fit.
    """
    by_name = {row.ours: row for row in rows}
    missing = [name for row in rows for name in row.theirs if name not in theirs.entries]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(f"{theirs.source}: has no weight {missing[0]}{more}")

    def read(name: str) -> Tensor:
        row = by_name[name]
        return row.packing.join([theirs.read(part) for part in row.theirs], heads)

    entries = {}
    for row in rows:
        parts = [theirs.entries[name] for name in row.theirs]
        shapes = [part.shape for part in parts]
        for name, shape, wanted in zip(row.theirs, shapes, row.packing.wanted(shapes, heads), strict=True):
            if shape != wanted:
                listed = ", ".join(f"{name} {list(shape)}" for name, shape in zip(row.theirs, shapes, strict=True))
                raise CheckpointError(
                    f"{theirs.source}: the shapes of {listed} do not match: {name} must be {list(wanted)}"
                )
        whole = row.packing.join([part.stand_in() for part in parts], heads)
        entries[row.ours] = WeightEntry(whole.dtype, tuple(whole.shape))
    return Weights(entries, read, theirs.source, {row.ours: " with ".join(row.theirs) for row in rows})


def to_foreign_weights(ours: Weights, rows: Sequence[Row], heads: Heads) -> Weights:
    """Our weights under the names of another layout: the inverse of `joined`. Raises CheckpointError if a weight is in
    no row.
    """
    present = {row.ours: row for row in rows if row.ours in ours.entries}
    lacking = ours.entries.keys() - present.keys()
    if lacking:
        raise CheckpointError(f"{ours.source}: the other layout has no name for {', '.join(sorted(lacking))}")
    origins = {name: (row.ours, number) for row in present.values() for number, name in enumerate(row.theirs)}

    @lru_cache(maxsize=1)  # the parts of one weight are read in succession
    def parts(name: str) -> list[Tensor]:
        row = present[name]
        return [part.contiguous() for part in row.packing.split(ours.read(name), heads, len(row.theirs))]

    def read(name: str) -> Tensor:
        whole, number = origins[name]
        return parts(whole)[number]

    entries: dict[str, WeightEntry] = {}
    for row in present.values():
        split = row.packing.split(ours.entries[row.ours].stand_in(), heads, len(row.theirs))
        entries |= {
            name: WeightEntry(part.dtype, tuple(part.shape)) for name, part in zip(row.theirs, split, strict=True)
        }
    return Weights(entries, read, ours.source)
