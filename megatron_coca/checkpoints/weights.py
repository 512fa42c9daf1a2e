"""Weights by name, read one at a time: what every layout on disk is for those that load or convert a model.

A model of 7 billion parameters is 13 GB in half precision. Nothing here holds more of one than the weight at hand.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError, pointer
from megatron_coca.checkpoints.weight_map import Heads, Row

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights may be written in and computed with, by name."""

_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_NAMED = {code: dtype for dtype, code in _CODES.items()}


class WeightEntry(NamedTuple):
    """What is known of a weight before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return prod(self.shape) * self.dtype.itemsize

    def stand_in(self) -> Tensor:
        """A tensor without memory of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Weights:
    """Weights that are read when they are asked for.

    Attributes:
        entries: every weight by its name, in the order in which they are best read.
        read: gives one of them, on the CPU, in the dtype and shape of its entry.
        source: the file or folder, for messages.
        origins: what the weights are called in `source`, where that is something else; for messages.
    """

    entries: Mapping[str, WeightEntry]
    read: Callable[[str], Tensor]
    source: Path
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """What a weight is called in `source`."""
        return self.origins.get(name, name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight with its name; forget one before the next to hold no more than one."""
        return ((name, self.read(name)) for name in self.entries)

    def to(self, dtype: torch.dtype) -> "Weights":
        """The same weights, rounded to `dtype` as they are read.

        Reading raises a CheckpointError where `dtype` cannot hold a value: it would become infinite.
        """

        def read(name: str) -> Tensor:
            exact = self.read(name)
            rounded = exact.to(dtype)
            if _overflows(exact, rounded):
                raise CheckpointError(f"{self.source}: {self.origin(name)} {_too_large(exact, dtype)}")
            return rounded

        return replace(self, entries={n: entry._replace(dtype=dtype) for n, entry in self.entries.items()}, read=read)

    def first_rows(self, names: Iterable[str], count: int) -> "Weights":
        """The same weights, of those with the given names the first `count` rows alone; a name may be missing."""
        cut = {name for name in names if name in self.entries}
        entries = {
            name: entry._replace(shape=(count, *entry.shape[1:])) if name in cut else entry
            for name, entry in self.entries.items()
        }
        return replace(
            self, entries=entries, read=lambda name: self.read(name)[:count] if name in cut else self.read(name)
        )

    def only(self, names: Iterable[str]) -> "Weights":
        """Some of them, in this order."""
        return replace(self, entries={name: self.entries[name] for name in names})

    def shards(self, limit: int) -> Iterator["Weights"]:
        """The same weights in their order, in parts of at most `limit` bytes; one that is larger stands alone."""
        part: list[str] = []
        taken = 0
        for name, entry in self.entries.items():
            if part and taken + entry.nbytes > limit:
                yield self.only(part)
                part, taken = [], 0
            part.append(name)
            taken += entry.nbytes
        yield self.only(part)


def _overflows(exact: Tensor, rounded: Tensor) -> bool:
    end = torch.finfo(rounded.dtype).max
    if end >= torch.finfo(exact.dtype).max or not exact.numel():
        return False
    low, high = exact.aminmax()
    if -end <= low and high <= end:  # the usual case, in which no memory is taken for the comparison below
        return False
    return bool((rounded.isinf() & exact.isfinite()).any())


def _too_large(exact: Tensor, dtype: torch.dtype) -> str:
    largest = float(exact[exact.isfinite()].abs().max())
    wider = [name for name, known in DTYPES.items() if torch.finfo(known).max >= largest]
    return (
        f"has values up to {largest:.6g}, and {str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:g}; "
        f"take {' or '.join(wider) or 'smaller values'}"
    )


def open_safetensors(files: Mapping[str, Path], source: Path) -> Weights:
    """The weights in safetensors files, from which file holds each one. Headers are read at once.

    Raises:
        CheckpointError: a file is missing or damaged, a weight is not in its file, or is no floating-point tensor.
    """
    entries: dict[str, WeightEntry] = {}
    for path in dict.fromkeys(files.values()):
        with _opened(path) as file:
            present = set(file.keys())
            for name in (name for name, place in files.items() if place == path):
                if name not in present:
                    raise CheckpointError(f"{path}: has no weight {name}, which the index of {source} looks for there")
                part = file.get_slice(name)
                entries[name] = WeightEntry(_dtype(part.get_dtype(), name, path), tuple(part.get_shape()))

    def read(name: str) -> Tensor:
        with _opened(files[name]) as file:
            return file.get_tensor(name)

    return Weights({name: entries[name] for name in files}, read, source)


def names_in(path: Path) -> list[str]:
    """The names of the weights in one safetensors file. Raises CheckpointError."""
    with _opened(path) as file:
        return list(file.keys())


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        told = pointer(path) or f"is not a readable safetensors file ({error}); fetch it again"
        raise CheckpointError(f"{path}: {told}") from error


def _dtype(code: str, name: str, path: Path) -> torch.dtype:
    if code not in _NAMED:
        raise CheckpointError(f"{path}: {name} is stored as {code}; known are {', '.join(_NAMED)}")
    return _NAMED[code]


def write_safetensors(
    path: Path, weights: Weights, metadata: Mapping[str, str] | None = None, digest: Any = None
) -> None:
    """Write weights to one file as they are read; the library's own writer wants all of them in memory. `digest`, an
    object of hashlib, is updated with all that is written.

    The format is a header of JSON with its length before it, then the values end to end (huggingface/safetensors,
    "Format").
    """
    header, end = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, entry in weights.entries.items():
        place = {"dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes]}
        header[name], end = place, end + entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that values lie at multiples of 8 bytes
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
    """Weights by our names from those of a foreign layout. `rows` are those that the foreign layout has.

    Raises:
        CheckpointError: a weight is missing, or parts of one do not fit together.
    """
    by_name = {row.ours: row for row in rows}
    missing = [name for row in rows for name in row.theirs if name not in theirs.entries]
    if missing:
        raise CheckpointError(f"{theirs.source}: has no weight {missing[0]}" + _and_more(missing))

    def read(name: str) -> Tensor:
        row = by_name[name]
        return row.packing.join([theirs.read(part) for part in row.theirs], heads)

    entries = {row.ours: _joined_entry(theirs, row, heads) for row in rows}
    return Weights(entries, read, theirs.source, {row.ours: " with ".join(row.theirs) for row in rows})


def _joined_entry(theirs: Weights, row: Row, heads: Heads) -> WeightEntry:
    parts = [theirs.entries[name] for name in row.theirs]
    found = [part.shape for part in parts]
    for name, shape, wanted in zip(row.theirs, found, row.packing.wanted(found, heads), strict=True):
        if shape != wanted:
            shapes = ", ".join(f"{name} {list(part)}" for name, part in zip(row.theirs, found, strict=True))
            raise CheckpointError(
                f"{theirs.source}: the shapes of {shapes} do not fit together: {name} has to be {list(wanted)}"
            )
    whole = row.packing.join([part.stand_in() for part in parts], heads)
    return WeightEntry(whole.dtype, tuple(whole.shape))


def to_foreign_weights(ours: Weights, rows: Sequence[Row], heads: Heads) -> Weights:
    """The way back: weights by foreign names, from ours. Rows of weights that a model does not have are left out.

    Raises:
        CheckpointError: a weight of ours is in no row.
    """
    present = {row.ours: row for row in rows if row.ours in ours.entries}
    lacking = ours.entries.keys() - present.keys()
    if lacking:
        raise CheckpointError(f"{ours.source}: the foreign layout has no name for {', '.join(sorted(lacking))}")
    places = {name: (row.ours, number) for row in present.values() for number, name in enumerate(row.theirs)}

    @lru_cache(maxsize=1)  # the parts of one weight are asked for one after the other
    def parts(name: str) -> list[Tensor]:
        row = present[name]
        return [part.contiguous() for part in row.packing.split(ours.read(name), heads, len(row.theirs))]

    def read(name: str) -> Tensor:
        whole, number = places[name]
        return parts(whole)[number]

    entries: dict[str, WeightEntry] = {}
    for row in present.values():
        split = row.packing.split(ours.entries[row.ours].stand_in(), heads, len(row.theirs))
        entries |= {
            name: WeightEntry(part.dtype, tuple(part.shape)) for name, part in zip(row.theirs, split, strict=True)
        }
    return Weights(entries, read, ours.source)


def _and_more(missing: Sequence[str]) -> str:
    return f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
