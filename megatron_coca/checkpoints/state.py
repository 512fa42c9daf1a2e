"""Optimizer state on disk, independent of how the run that wrote it was divided among processes.

Every rank writes the pieces that it holds into a file of its own: flat float32 stretches of named parameters and of
their moments, with the place of each. A reader with another number of ranks, another ZeRO stage or another division of
matrices finds any stretch of any parameter in them.

    state/rank_00000.safetensors    tensors `kind:name:start`; metadata `places`: the shard of every parameter in it
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_coca.checkpoints.errors import CheckpointError
from megatron_coca.checkpoints.weights import Entry, Weights

WEIGHT = "weight"
"""The kind of a piece of the weights themselves; other kinds are names of optimizer states."""


class Shard(NamedTuple):
    """Part `index` of `count` of a tensor cut along `dim`: of each of the blocks, whose sizes are given, one part.

    Blocks are what a packed projection holds one after the other; a plain matrix is one block.
    """

    dim: int
    index: int
    count: int
    blocks: tuple[int, ...]

    def cut(self, full: Tensor) -> Tensor:
        """This part of the whole tensor."""
        parts = [block.chunk(self.count, self.dim)[self.index] for block in full.split(self.blocks, self.dim)]
        return torch.cat(parts, self.dim)

    def place(self, part: Tensor, full: Tensor) -> None:
        """Write this part into the whole tensor."""
        begin = taken = 0
        for block in self.blocks:
            size = block // self.count
            full.narrow(self.dim, begin + self.index * size, size).copy_(part.narrow(self.dim, taken, size))
            begin, taken = begin + block, taken + size

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The whole tensor's shape, from that of a part."""
        return (*local[: self.dim], sum(self.blocks), *local[self.dim + 1 :])


class Place(NamedTuple):
    """The shape of a parameter on a rank, and which part of the whole it is (None: all of it)."""

    shape: tuple[int, ...]
    shard: Shard | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.shard.full_shape(self.shape) if self.shard is not None else self.shape


class Piece(NamedTuple):
    """A stretch of one parameter, or of one of its optimizer states, as a rank holds it.

    Attributes:
        name: the parameter's name in the model.
        kind: ``WEIGHT`` or the optimizer state's name.
        start: where the stretch begins in the rank's flattened parameter.
        tensor: 1-D; the memory that the engine works on, so that writing into it restores the state.
    """

    name: str
    kind: str
    start: int
    tensor: Tensor


def file_name(rank: int) -> str:
    """The file of a rank's pieces, within the folder of the state."""
    return f"rank_{rank:05d}.safetensors"


def write_pieces(path: Path, pieces: Iterable[Piece], places: Mapping[str, Place]) -> None:
    """Write a rank's file; tensors must lie in CPU memory."""
    tensors = {f"{piece.kind}:{piece.name}:{piece.start}": piece.tensor for piece in pieces}
    names = {key.split(":")[1] for key in tensors}
    described = {name: places[name] for name in sorted(names)}
    save_file(tensors, path, metadata={"places": json.dumps(described)})


class _Source(NamedTuple):
    """Where a stretch lies on disk."""

    file: Any
    key: str
    start: int
    numel: int
    shard: Shard | None


class StateReader:
    """The pieces of all ranks in one folder, read as they are needed. Use it as a context manager.

    Raises:
        CheckpointError: the folder holds no state, or a file in it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._sources: dict[tuple[str, str], list[_Source]] = defaultdict(list)
        self._places: dict[str, Place] = {}
        paths = sorted(folder.glob("rank_*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder}: holds no state of any rank")
        for path in paths:
            self._open(path)

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every parameter, in the order of the files."""
        return {name: place.full_shape for name, place in self._places.items()}

    @property
    def stored(self) -> dict[str, int]:
        """Elements of each kind in all files; what several ranks hold counts again."""
        found: Counter[str] = Counter()
        for (kind, _), sources in self._sources.items():
            found[kind] += sum(source.numel for source in sources)
        return dict(found)

    def require_complete(self) -> None:
        """Look for a gap, without reading values.

        Raises:
            CheckpointError: a stretch of a parameter, or of one of its states, is in no file.
        """
        for kind, name in self._sources:
            for sources in self._by_shard(name, kind).values():
                self._stretches(sources, 0, prod(self._places[name].shape), kind, name)

    def fill(self, piece: Piece, place: Place) -> None:
        """Copy what was saved into the memory of `piece`, whose parameter lies at `place` now.

        Raises:
            CheckpointError: the state does not hold all of it.
        """
        stop = piece.start + piece.tensor.numel()
        same = [source for source in self._sources[piece.kind, piece.name] if source.shard == place.shard]
        if same:
            self._copy(same, piece.start, stop, piece)
            return
        whole = self.whole(piece.name, piece.kind)
        local = place.shard.cut(whole) if place.shard is not None else whole
        piece.tensor.copy_(local.reshape(-1)[piece.start : stop])

    def whole(self, name: str, kind: str = WEIGHT) -> Tensor:
        """A parameter, or one of its states, in its whole shape, float32 on the CPU.

        Raises:
            CheckpointError: the state does not hold all of it.
        """
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self._folder}: holds no parameter {name}")
        full = torch.empty(place.full_shape)
        for shard, sources in self._by_shard(name, kind).items():
            part = torch.empty(place.shape) if shard is not None else full
            flat = part.view(-1)
            self._copy(sources, 0, flat.numel(), Piece(name, kind, 0, flat))
            if shard is not None:
                shard.place(part, full)
        return full

    def _by_shard(self, name: str, kind: str) -> dict[Shard | None, list[_Source]]:
        found: dict[Shard | None, list[_Source]] = defaultdict(list)
        for source in self._sources[kind, name]:
            found[source.shard].append(source)
        shard = self._places[name].shard
        wanted = [None] if shard is None else [shard._replace(index=index) for index in range(shard.count)]
        return {each: found[each] for each in wanted}

    def _copy(self, sources: Sequence[_Source], begin: int, stop: int, piece: Piece) -> None:
        """Fill the tensor of `piece` with the stretch [begin, stop) of a flattened parameter."""
        for source, first, last in self._stretches(sources, begin, stop, piece.kind, piece.name):
            part = source.file.get_slice(source.key)[first - source.start : last - source.start]
            piece.tensor[first - begin : last - begin].copy_(part)

    def _stretches(
        self, sources: Sequence[_Source], begin: int, stop: int, kind: str, name: str
    ) -> list[tuple[_Source, int, int]]:
        """Which source gives what of [begin, stop)."""
        found, reached = [], begin
        for source in sorted(sources, key=lambda each: each.start):
            last = min(stop, source.start + source.numel)
            if source.start <= reached < last:
                found.append((source, reached, last))
                reached = last
        if reached < stop:
            raise CheckpointError(
                f"{self._folder}: {kind} of {name} is not complete: elements from {reached} on are in no file; files "
                "of some ranks are missing"
            )
        return found

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, "pt"))
            places = {name: _place(given) for name, given in json.loads(file.metadata()["places"]).items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read as state of a rank: {error}") from error
        self._places |= {name: place for name, place in places.items() if name not in self._places}
        for key in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            kind, name, start = key.split(":")
            (numel,) = file.get_slice(key).get_shape()
            self._sources[kind, name].append(_Source(file, key, int(start), numel, places[name].shard))


def _place(given: Sequence[Any]) -> Place:
    """A place as JSON holds it."""
    shape, shard = given
    if shard is None:
        return Place(tuple(shape))
    dim, index, count, blocks = shard
    return Place(tuple(shape), Shard(dim, index, count, tuple(blocks)))


def weights(reader: StateReader, dtype: torch.dtype, source: Path) -> Weights:
    """Every weight in its whole shape, in `dtype`; `source` is the folder of the checkpoint."""
    entries = {name: Entry(dtype, shape) for name, shape in reader.shapes.items()}
    return Weights(entries, lambda name: reader.whole(name).to(dtype), source)
